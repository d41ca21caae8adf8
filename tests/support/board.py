"""The real TensorBoard, served by a thread of this process and queried over HTTP."""

import contextlib
import json
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

from tensorboard import program

SECONDS = 120  # until it has read everything, at most
# No proxy: it runs on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Board:
    """A TensorBoard that runs at `url`, which ends in a slash."""

    def __init__(self, url: str):
        self.url = url

    def read(self, path: str, content: dict | None = None) -> bytes:
        """Returns what is at an address below `data/plugin/`; some JSON is posted there."""
        request = urllib.request.Request(
            f"{self.url}data/plugin/{path}",
            None if content is None else json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with _opener.open(request, timeout=60) as answer:
            return answer.read()

    def get(self, path: str, **query):
        """Returns the JSON of such an address."""
        return json.loads(self.read(f"{path}?{urllib.parse.urlencode(query)}"))

    def post(self, path: str, content: dict):
        """Returns the JSON that answers some JSON."""
        return json.loads(self.read(path, content))

    def wait_for(self, *last: tuple[str, dict]) -> None:
        """Waits until all of these addresses have content: what is read last of each run."""
        end = time.monotonic() + SECONDS
        for path, query in last:
            found = None
            while not found:
                assert time.monotonic() < end, f"TensorBoard does not show {path} {query}"
                with contextlib.suppress(urllib.error.HTTPError):  # not read yet
                    found = self.get(path, **query)
                time.sleep(0.1)


@contextlib.contextmanager
def serving(logdir: Path) -> Iterator[Board]:
    """Serves a folder on a free port of this machine, until the process ends."""
    tensorboard = program.TensorBoard()
    where = ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    tensorboard.configure([None, "--logdir", str(logdir), *where])
    yield Board(tensorboard.launch())
