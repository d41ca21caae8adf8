"""Downloads files from several mirrors in turn and checks their hash."""

import sys
from collections.abc import Sequence
from pathlib import Path

import requests

from data import files
from data.errors import DataError
from data.live_line import live_line

# One of the WikiText mirrors answers 403 to the default User-Agent of Python's libraries.
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; keras-recipes)",
    "Accept-Encoding": "identity",
}
SECONDS = (4.0, 10.0)  # timeouts of a mirror: to connect, and without data
CHUNK_BYTES = 64 * 1024
NO_NETWORK = "no network"
NO_NETWORK_SIGNS = (
    "Name or service not known",
    "Temporary failure in name resolution",
    "Network is unreachable",
)


def fetch(urls: Sequence[str], checksum: str, target: Path, what: str = "file") -> None:
    """Downloads a file from the first mirror that has it, unless it exists undamaged.

    Args:
        urls: The mirrors, tried in this order.
        checksum: SHA-256 or MD5 that the file must have, hex; other content is discarded.
        target: The file to write. It appears whole or not at all.
        what: Name of the download, for messages.

    Raises:
        DataError: Every mirror failed; the message says why.
    """

    def build(temporary: Path) -> None:
        failures: dict[str, str] = {}
        for url in urls:
            failure = _download(url, temporary, checksum, what)
            if failure is None:
                print(f"{what}: downloaded from {url}", file=sys.stderr, flush=True)
                return
            failures[url] = failure
        reasons = "; ".join(f"{url} {failure}" for url, failure in failures.items())
        if set(failures.values()) == {NO_NETWORK}:
            reasons = NO_NETWORK
        raise DataError(f"{what}: {reasons}")

    files.build_once(target, build, f"downloading {what}", checksum)


def _download(url: str, path: Path, checksum: str, what: str) -> str | None:
    """Downloads to a path; returns None, or why this mirror failed."""
    try:
        request = requests.get(url, headers=HEADERS, stream=True, timeout=SECONDS)
        with request as response, open(path, "wb") as file:
            if not response.ok:
                return f"answered {response.status_code} {response.reason}"
            total = int(response.headers.get("Content-Length", 0)) or None
            with live_line(what=what, total=total, unit="B", unit_scale=True) as bar:
                for chunk in response.iter_content(CHUNK_BYTES):
                    file.write(chunk)
                    bar.update(len(chunk))
    except requests.Timeout:
        return "did not answer in time"
    except requests.RequestException as error:
        reason = " ".join(str(error).split())
        if any(sign in reason for sign in NO_NETWORK_SIGNS):
            return NO_NETWORK
        return f"failed ({reason[:200]})"
    received = files.checksum_like(path, checksum)
    if received != checksum:
        kind = files.kind_of(checksum)
        return f"sent something else: {kind} {received[:12]}..., expected {checksum[:12]}..."
    return None
