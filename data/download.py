"""Downloads: several mirrors in turn, checked against a hash; zip archives, read safely."""

import hashlib
import math
import os
import stat
import sys
import threading
import time
import zipfile
import zlib
from collections.abc import Iterable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path, PurePosixPath
from typing import BinaryIO

import requests
from tqdm import tqdm

from data import cache, paths
from data.errors import DataError

# One of the WikiText mirrors answers 403 to the default User-Agent of Python's libraries.
USER_AGENT = "Mozilla/5.0 (compatible; keras-recipes)"

# A server that sends fewer bytes than this in `timeout` seconds is given up.
CHUNK_BYTES = 16 * 1024
NO_ADDRESS = "has no known address (no network?)"
NO_NETWORK = {NO_ADDRESS, "cannot be reached (Network is unreachable)"}
# What zipfile raises: RuntimeError for an encrypted member, and for one that is compressed in an
# unknown way a subclass of it.
ZIP_ERRORS = (zipfile.BadZipFile, zlib.error, EOFError, RuntimeError)


def fetch(
    urls: Sequence[str],
    sha256: str,
    target: Path,
    timeout: float = 30.0,
    what: str = "file",
    answer_within: float | None = None,
) -> None:
    """Downloads a file from the first mirror that has it, unless it is there already, undamaged.

    Args:
        urls: The mirrors, in the order in which they are tried.
        sha256: Hex digest that the file must have; anything else is thrown away.
        target: The file to make. It appears whole or not at all.
        timeout: Seconds without data after which a mirror is given up.
        what: What is downloaded, for messages.
        answer_within: Seconds that all mirrors together may take to begin to answer, each an equal
            share of what is left. None gives each one `timeout` seconds.

    Raises:
        DataError: No mirror delivered; the message says why for each.
    """
    cache.build_once(
        Path(target),
        lambda temporary: _fetch(urls, sha256, temporary, timeout, what, answer_within),
        f"downloading {what}",
        sha256,
    )


def _fetch(
    urls: Sequence[str],
    sha256: str,
    target: Path,
    timeout: float,
    what: str,
    answer_within: float | None,
) -> None:
    budget = math.inf if answer_within is None else answer_within
    failures: dict[str, str] = {}
    for tried, url in enumerate(urls):
        patience = min(timeout, budget / (len(urls) - tried))
        with open(target, "wb") as file:
            sink = _Sink(file)
            failure = _download(url, sink, patience, timeout, what)
        budget -= sink.first_data - sink.started
        if failure is None and sink.sha256.hexdigest() != sha256.lower():
            failure = (
                f"sent something else: {sink.arrived} bytes with sha256 "
                f"{sink.sha256.hexdigest()[:12]}..., expected {sha256[:12]}..."
            )
        if failure is None:
            print(f"{what}: downloaded from {url}", file=sys.stderr, flush=True)
            return
        failures[url] = failure
    target.unlink(missing_ok=True)
    reasons = [f"{url} {failure}" for url, failure in failures.items()]
    raise DataError(f"{what} could not be downloaded: " + "; ".join(reasons), _in_short(failures))


def _in_short(failures: dict[str, str]) -> str:
    """Why no mirror delivered, by the names of the hosts."""
    if set(failures.values()) <= NO_NETWORK:
        return "no network"
    hosts = {url: url.partition("://")[2].partition("/")[0] or url for url in failures}
    return "; ".join(f"{hosts[url]} {failure}" for url, failure in failures.items())


class _Sink:
    """Where a download goes: it hashes, counts, and ends a download that was given up."""

    def __init__(self, file: BinaryIO):
        self.file = file
        self.sha256 = hashlib.sha256()
        self.arrived = 0
        self.started = self.first_data = self.last_data = time.monotonic()
        self.given_up = False

    def write(self, chunk: bytes) -> None:
        if self.given_up:
            raise TimeoutError
        self.last_data = time.monotonic()
        if not self.arrived:
            self.first_data = self.last_data
        self.file.write(chunk)
        self.sha256.update(chunk)
        self.arrived += len(chunk)


def _download(url: str, sink: _Sink, patience: float, timeout: float, what: str) -> str | None:
    """Returns None, or why this mirror failed."""
    errors: list[BaseException] = []
    bar = tqdm(desc=what, unit="B", unit_scale=True, leave=False, disable=None)

    def run() -> None:
        headers = {"User-Agent": USER_AGENT, "Accept-Encoding": "identity"}
        try:
            # This timeout only ends a thread that was given up below.
            with requests.get(url, headers=headers, stream=True, timeout=2 * timeout) as response:
                response.raise_for_status()
                bar.total = int(response.headers.get("Content-Length", 0)) or None
                for chunk in response.iter_content(CHUNK_BYTES):
                    sink.write(chunk)
                    bar.update(len(chunk))
        except BaseException as error:
            errors.append(error)

    # A thread, because looking up a name can block for longer than any timeout of the socket.
    worker = threading.Thread(target=run, daemon=True)
    worker.start()
    said = False
    try:
        while worker.is_alive():
            worker.join(0.1)
            silent = time.monotonic() - sink.last_data
            if worker.is_alive() and silent > (timeout if sink.arrived else patience):
                if sink.arrived:
                    return f"stopped sending after {sink.arrived} bytes ({silent:.0f} s of silence)"
                sink.first_data = time.monotonic()
                return f"sent no data within {patience:.3g} s"
            if bar.disable and sink.arrived and worker.is_alive() and not said:
                print(f"downloading {what} from {url}", file=sys.stderr, flush=True)
                said = True
    finally:
        sink.given_up = True
        bar.close()
    if not sink.arrived:
        sink.first_data = time.monotonic()
    return _reason(errors[0]) if errors else None


def _reason(error: BaseException) -> str:
    """Says in a few words what went wrong with a mirror; raises what is not the mirror's doing."""
    if isinstance(error, OSError) and error.errno in cache.REPAIRABLE:
        raise error
    text = str(error)
    if isinstance(error, requests.HTTPError) and error.response is not None:
        return f"answered {error.response.status_code} {error.response.reason}"
    if isinstance(error, requests.Timeout):
        return "did not answer in time"
    if "IncompleteRead" in text:
        return "cut the file off"
    for known in ("Name or service not known", "Temporary failure in name resolution"):
        if known in text:
            return NO_ADDRESS
    for known in ("Connection refused", "Network is unreachable", "CERTIFICATE_VERIFY_FAILED"):
        if known in text:
            return f"cannot be reached ({known})"
    return f"failed ({type(error).__name__}: {' '.join(text.split())[:200]})"


@contextmanager
def open_zip(path: Path, name: str) -> Iterator[zipfile.ZipFile]:
    """Opens a zip archive whose paths are safe; what is wrong with it becomes a `DataError`.

    Args:
        path: The zip file.
        name: Its name, for messages.

    Raises:
        DataError: The archive is damaged or cannot be read, or a path in it leaves its folder.
    """
    try:
        with zipfile.ZipFile(path) as archive:
            check_members(archive, name)
            yield archive
    except ZIP_ERRORS as error:
        raise DataError(f"{name}: damaged zip archive ({error})") from error


def check_members(members: zipfile.ZipFile, name: str) -> None:
    """Refuses an archive in which a path is absolute, climbs with "..", or is a symbolic link.

    Args:
        members: The open archive.
        name: Its name, for messages.

    Raises:
        DataError: Names the first such path.
    """
    for info in members.infolist():
        # zipfile cuts a name at a NUL byte and turns os.sep into "/"; look at what was written.
        path = info.orig_filename.replace("\\", "/")
        if path.startswith("/") or path[1:2] == ":" or ".." in PurePosixPath(path).parts:
            raise DataError(f"{name}: the path {path!r} in the archive leaves its folder")
        if stat.S_ISLNK(info.external_attr >> 16):
            raise DataError(f"{name}: {path!r} in the archive is a symbolic link")


def check_unpacked_size(archive: zipfile.ZipFile, members: Iterable[str], name: str) -> None:
    """Refuses members that unpack to more than is in proportion (see `paths.unpacked_limit`).

    zipfile reads no more of a member than the archive declares: a member that is larger than it
    says fails at its checksum.

    Args:
        archive: The open archive.
        members: Names of the members that will be read.
        name: The archive's name, for messages.

    Raises:
        DataError: Names both sizes.
    """
    chosen = [archive.getinfo(member) for member in members]
    packed = min(
        sum(info.compress_size for info in chosen), os.path.getsize(archive.filename or name)
    )
    declared = sum(info.file_size for info in chosen)
    if declared > paths.unpacked_limit(packed):
        raise paths.too_large(name, packed, declared)
