"""Downloads: several mirrors in turn, checked against a hash."""

import hashlib
import math
import queue
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path

import requests
from tqdm import tqdm

from data import files
from data.errors import DataError

# One of the WikiText mirrors answers 403 to the default User-Agent of Python's libraries.
HEADERS = {
    "User-Agent": "Mozilla/5.0 (compatible; keras-recipes)",
    "Accept-Encoding": "identity",
}
STALL_SECONDS = 30.0  # without data, after which a mirror is given up
CHUNK_BYTES = 64 * 1024
NO_ADDRESS = "has no known address (no network?)"
NO_NETWORK = {NO_ADDRESS, "cannot be reached (Network is unreachable)"}


def fetch(
    urls: Sequence[str],
    sha256: str,
    target: Path,
    what: str = "file",
    answer_within: float | None = None,
) -> None:
    """Downloads a file from the first mirror that has it, unless it is there already, undamaged.

    Args:
        urls: The mirrors, in the order in which they are tried.
        sha256: Hex digest that the file must have; anything else is thrown away.
        target: The file to make. It appears whole or not at all.
        what: What is downloaded, for messages.
        answer_within: Seconds that all mirrors together may take to begin to answer, each an equal
            share of what is left. None gives each one `STALL_SECONDS`.

    Raises:
        DataError: No mirror delivered; the message says why for each.
    """
    budget = math.inf if answer_within is None else answer_within

    def build(temporary: Path) -> None:
        deadline = time.monotonic() + budget
        failures: dict[str, str] = {}
        for tried, url in enumerate(urls):
            left = max(deadline - time.monotonic(), 0.1)
            patience = min(STALL_SECONDS, left / (len(urls) - tried))
            failure = _download(url, temporary, sha256, patience, what)
            if failure is None:
                print(f"{what}: downloaded from {url}", file=sys.stderr, flush=True)
                return
            failures[url] = failure
        reasons = "; ".join(f"{url} {failure}" for url, failure in failures.items())
        short = "no network" if set(failures.values()) <= NO_NETWORK else reasons
        raise DataError(f"{what} could not be downloaded: {reasons}", short)

    files.build_once(target, build, f"downloading {what}", sha256)


def _download(url: str, path: Path, sha256: str, patience: float, what: str) -> str | None:
    """Downloads to a path; returns None, or why this mirror failed."""
    digest = hashlib.sha256()
    try:
        with _answer(url, patience) as response, open(path, "wb") as file:
            response.raise_for_status()
            total = int(response.headers.get("Content-Length", 0)) or None
            chunks = response.iter_content(CHUNK_BYTES)
            chunk = next(chunks, b"")  # the bar shows a download that has begun
            with tqdm(desc=what, total=total, unit="B", unit_scale=True, disable=None) as bar:
                while chunk:
                    file.write(chunk)
                    digest.update(chunk)
                    bar.update(len(chunk))
                    chunk = next(chunks, b"")
    except requests.RequestException as error:
        return _reason(error)
    if digest.hexdigest() != sha256.lower():
        found = f"{path.stat().st_size} bytes with sha256 {digest.hexdigest()[:12]}..."
        return f"sent something else: {found}, expected {sha256[:12]}..."
    return None


def _answer(url: str, patience: float) -> requests.Response:
    """Asks a mirror; raises `requests.Timeout` if it does not begin to answer in time."""
    answers: queue.SimpleQueue = queue.SimpleQueue()

    def ask() -> None:
        try:
            timeout = (patience, STALL_SECONDS)
            answers.put(requests.get(url, headers=HEADERS, stream=True, timeout=timeout))
        except Exception as error:
            answers.put(error)

    # A thread, because looking up a name can block for longer than any timeout of the socket.
    threading.Thread(target=ask, daemon=True).start()
    try:
        answer = answers.get(timeout=patience)
    except queue.Empty:
        raise requests.Timeout from None
    if isinstance(answer, Exception):
        raise answer
    return answer


def _reason(error: requests.RequestException) -> str:
    """Says in a few words what went wrong with a mirror."""
    text = str(error)
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "did not answer in time"
    if "Read timed out" in text:
        return "stopped sending"
    if "IncompleteRead" in text:
        return "cut the file off"
    for known in ("Name or service not known", "Temporary failure in name resolution"):
        if known in text:
            return NO_ADDRESS
    for known in ("Connection refused", "Network is unreachable", "CERTIFICATE_VERIFY_FAILED"):
        if known in text:
            return f"cannot be reached ({known})"
    return f"failed ({type(error).__name__}: {' '.join(text.split())[:200]})"
