"""Downloads files from several mirrors in turn and checks their hash."""

import socket
import sys
import time
import urllib.parse
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
LOOKING_SECONDS = 10.0  # to connect in vain, all mirrors together
CHUNK_BYTES = 64 * 1024
UNREACHABLE = "could not be reached in time"
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
        left = LOOKING_SECONDS
        for url in urls:
            start = time.monotonic()
            failure = _download(url, temporary, checksum, what, left)
            if failure in (UNREACHABLE, NO_NETWORK):
                left -= time.monotonic() - start
            if failure is None:
                print(f"{what}: downloaded from {url}", file=sys.stderr, flush=True)
                return
            failures[url] = failure
        reasons = "; ".join(f"{url} {failure}" for url, failure in failures.items())
        if set(failures.values()) == {NO_NETWORK}:
            reasons = NO_NETWORK
        raise DataError(f"{what}: {reasons}")

    files.build_once(target, build, f"downloading {what}", checksum)


def _addresses(url: str) -> int:
    """Returns the number of addresses of a URL's host, which are tried in turn."""
    if requests.utils.get_environ_proxies(url):  # a proxy knows them
        return 1
    parts = urllib.parse.urlsplit(url)
    port = parts.port or parts.scheme
    try:
        return len(socket.getaddrinfo(parts.hostname, port, type=socket.SOCK_STREAM))
    except OSError:
        return 1


def _download(url: str, path: Path, checksum: str, what: str, left: float) -> str | None:
    """Downloads to a path; returns None, or why this mirror failed.

    `left` limits the seconds to connect.
    """
    if left <= 0.01:
        return UNREACHABLE
    try:
        # The timeout holds for each address.
        timeout = (min(SECONDS[0], left) / _addresses(url), SECONDS[1])
        request = requests.get(url, headers=HEADERS, stream=True, timeout=timeout)
        with request as response, open(path, "wb") as file:
            if not response.ok:
                return f"answered {response.status_code} {response.reason}"
            total = int(response.headers.get("Content-Length", 0)) or None
            with live_line(what=what, total=total, unit="B", unit_scale=True) as bar:
                for chunk in response.iter_content(CHUNK_BYTES):
                    file.write(chunk)
                    bar.update(len(chunk))
    except requests.ConnectTimeout:
        return UNREACHABLE
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
