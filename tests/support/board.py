"""The real TensorBoard, started on a folder and asked through its HTTP interface."""

import contextlib
import json
import os
import re
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.parse
import urllib.request
from collections.abc import Iterator
from pathlib import Path

STARTS = 120  # seconds, at most
# No proxy: it runs on this machine.
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


class Board:
    """A TensorBoard that runs.

    Attributes:
        url: its address, with a slash at the end.
    """

    def __init__(self, url: str):
        self.url = url

    def get(self, path: str, **query):
        """The JSON of an address below `data/plugin/`."""
        url = f"{self.url}data/plugin/{path}?{urllib.parse.urlencode(query)}"
        with _opener.open(url, timeout=60) as answer:
            return json.load(answer)

    def read(self, path: str) -> bytes:
        """The bytes of such an address."""
        with _opener.open(f"{self.url}data/plugin/{path}", timeout=60) as answer:
            return answer.read()

    def post(self, path: str, content: dict):
        """The JSON that comes back for some JSON."""
        request = urllib.request.Request(
            f"{self.url}data/plugin/{path}",
            json.dumps(content).encode(),
            {"Content-Type": "application/json"},
        )
        with _opener.open(request, timeout=60) as answer:
            return json.load(answer)

    def wait_for(self, *last: tuple[str, dict]) -> None:
        """Waits until all of these answer with something: what is read last of each run.

        Args:
            last: addresses and their queries, as for `get`.
        """
        end = time.monotonic() + STARTS
        for path, query in last:
            while not self._answers(path, query):
                assert time.monotonic() < end, f"TensorBoard does not show {path} {query}"
                time.sleep(0.1)

    def _answers(self, path: str, query: dict) -> bool:
        with contextlib.suppress(urllib.error.HTTPError):  # of a run or tag that is not read yet
            return bool(self.get(path, **query))
        return False


@contextlib.contextmanager
def serving(logdir: Path) -> Iterator[Board]:
    """TensorBoard on a free port of this machine, in a process that is killed afterwards."""
    command = [sys.executable, "-m", "tensorboard.main", "--logdir", str(logdir)]
    command += ["--host", "127.0.0.1", "--port", "0", "--load_fast", "false"]
    process = subprocess.Popen(
        command,
        env={**os.environ, "CUDA_VISIBLE_DEVICES": "-1", "TF_CPP_MIN_LOG_LEVEL": "3"},
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    # It says where it serves, once it does; a timer ends the reading if it never does.
    timer = threading.Timer(STARTS, process.kill)
    timer.start()
    try:
        said = []
        for line in process.stdout:
            said.append(line)
            found = re.search(r"at (http://127\.0\.0\.1:\d+/)", line)
            if found:
                break
        else:
            raise AssertionError("TensorBoard does not serve:\n" + "".join(said))
        threading.Thread(target=process.stdout.read, daemon=True).start()
        yield Board(found[1])
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
