"""Fetches ten million words of English novels, 1840 to 1920: ELTeC-eng, edited by Lou Burnard.

The texts are in the public domain, their markup is CC BY 4.0 and left out here. GitHub promises no
fixed checksum for an archive of a repository, but a commit is one: `git` verifies every file that
it fetches against it.
"""

import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from collections.abc import Iterator
from pathlib import Path

from data import download, files
from data.errors import DataError
from data.live_line import is_shown, live_line

NAME = "novels"
REPOSITORY = "https://github.com/COST-ELTeC/ELTeC-eng"
COMMIT = "3db3b6738a836f0e1b276b6c9703e42f4297f978"  # ELTeC-eng 1.0.1, https://doi.org/10.5281/zenodo.4662490
FOLDER = "level1"  # of the repository: a TEI file per novel
TEI = "{http://www.tei-c.org/ns/1.0}"
# Mistress and Maid, Dombey and Son, Auriol, Vanity Fair, The Mayor of Casterbridge.
VALIDATION = (
    "ENG18480_Thackeray",
    "ENG18481_Dickens",
    "ENG18500_Ainsworth",
    "ENG18630_Craik",
    "ENG18860_Hardy",
)
SECONDS = 30  # without a byte a second, after which git gives up


def fetch_novels(cache_dir: Path) -> Path:
    """Fetches the novels unless the cache has them.

    Args:
        cache_dir: The cache.

    Returns:
        A folder with `valid.txt`, the five novels of `VALIDATION`, and `train.txt`, all others, in
        the order of their files' names, a paragraph or a line of verse per line.

    Raises:
        DataError: Git is missing or cannot fetch the commit, or a file is not what it should be.
    """
    folder = Path(cache_dir) / f"{NAME}-{COMMIT[:12]}"
    files.build_once(folder, _build, f"fetching {NAME}")
    return folder


def _build(folder: Path) -> None:
    repository = folder / "repository"
    repository.mkdir(parents=True)
    print(f"{NAME}: fetching {REPOSITORY} at {COMMIT[:12]}", file=sys.stderr, flush=True)
    try:
        _git(repository, "init", "--quiet")
        _git(repository, "fetch", "--depth", "1", REPOSITORY, COMMIT)
        _git(repository, "checkout", "--quiet", "FETCH_HEAD", "--", FOLDER)
        paths = sorted((repository / FOLDER).glob("*.xml"))
        missing = [name for name in VALIDATION if name not in {path.stem for path in paths}]
        if missing or len(paths) == len(VALIDATION):
            raise DataError(f"{NAME}: no {missing[0] if missing else 'novel to train on'}")
        with (
            open(folder / "train.txt", "w", encoding="utf-8") as train,
            open(folder / "valid.txt", "w", encoding="utf-8") as valid,
            live_line(what=NAME, total=len(paths), unit=" novels") as bar,
        ):
            for path in paths:
                split = valid if path.stem in VALIDATION else train
                split.writelines(f"{line}\n" for line in paragraphs(path))
                bar.update(1)
    finally:
        files.remove(repository)


def paragraphs(path: Path) -> Iterator[str]:
    """Reads the paragraphs and verse lines of a novel's body, with single spaces.

    Title pages, headings and what stands after the body are left out; a verse line within a
    paragraph is part of it.

    Args:
        path: A TEI file.

    Raises:
        DataError: The file is not XML, or has no body.
    """
    try:
        body = ElementTree.parse(path).find(f"{TEI}text/{TEI}body")
    except ElementTree.ParseError as error:
        raise DataError(f"{NAME}: {path.name} is not XML ({error})") from error
    if body is None:
        raise DataError(f"{NAME}: {path.name} has no body")
    left = [body]
    while left:
        element = left.pop()
        if element.tag in (f"{TEI}p", f"{TEI}l"):
            line = " ".join("".join(element.itertext()).split())
            if line:
                yield line
        else:
            left += reversed(element)


def _git(folder: Path, *words: str) -> None:
    """Runs git in a folder, with its progress on a terminal, and without asking for a password."""
    limits = ["-c", "http.lowSpeedLimit=1", "-c", f"http.lowSpeedTime={SECONDS}"]
    environment = {**os.environ, "GIT_TERMINAL_PROMPT": "0", "LC_ALL": "C"}
    try:
        done = subprocess.run(
            ["git", *limits, "-C", folder, *words],
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=None if is_shown() else subprocess.PIPE,
            text=True,
            errors="replace",
            check=False,
        )
    except FileNotFoundError:
        raise DataError(
            f"{NAME}: git is not installed; or pass a folder with train.txt and valid.txt"
        ) from None
    if done.returncode:
        said = (done.stderr or "").strip()
        reason = said.splitlines()[-1] if said else f"git {words[0]} ended with {done.returncode}"
        if "Could not resolve host" in said:
            reason = download.NO_NETWORK
        raise DataError(f"{NAME}: {reason}; or pass a folder with train.txt and valid.txt")
