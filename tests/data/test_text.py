import gzip
import hashlib
import http.server
import itertools
import os
import socket
import threading
import time
import tracemalloc
import zipfile

import pytest

from data import installed_docs, text
from data.errors import DataError

SPLITS = {
    "train": [" = Robert Boulter = ", " Robert <unk> is an English actor . ", " He had a role . "],
    "valid": [" = Homarus gammarus = "],
    "test": [" Du Fu was a prominent poet . ", " née "],
}


def content(lines):
    return ("\n".join(["", *lines[:1], "  ", *lines[1:]]) + "\n").encode()


def make_wikitext_zip(path, folder="wikitext-2/", kind="tokens", extra=()):
    with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
        for split, lines in SPLITS.items():
            archive.writestr(f"{folder}wiki.{split}.{kind}", content(lines))
        for name in extra:
            archive.writestr(name, "extra")


@pytest.fixture
def server(tmp_path):
    """Serves what lies in `served`, and counts the requests."""
    folder = tmp_path / "served"
    folder.mkdir()

    class Handler(http.server.SimpleHTTPRequestHandler):
        def __init__(self, *args):
            super().__init__(*args, directory=str(folder))

        def log_message(self, *args):
            server.requests.append(self.path)

    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.folder = folder
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.shutdown()
    thread.join()
    server.server_close()


@pytest.fixture
def wikitext(server, monkeypatch):
    """Makes WikiText what the server has."""

    def replace(*mirrors, name="wikitext-2"):
        path = server.folder / "a.zip"
        sha256 = hashlib.sha256(path.read_bytes()).hexdigest() if path.exists() else "0" * 64
        archive = text.Archive("a.zip", mirrors or (f"{server.url}/",), sha256)
        monkeypatch.setitem(text.WIKITEXT, name, archive)

    return replace


@pytest.fixture
def fake_docs(monkeypatch):
    splits = {split: [f"{split} docs"] for split in text.SPLITS}
    monkeypatch.setattr(installed_docs, "load_installed_docs", lambda cache_dir: splits)
    return splits


def lines_of(loaded):
    """The lines of each split, read twice."""
    found = {split: list(lines) for split, lines in loaded.splits.items()}
    assert found == {split: list(lines) for split, lines in loaded.splits.items()}
    return found


def error_of(dataset, tmp_path):
    with pytest.raises(DataError) as error:
        lines_of(text.load_text(str(dataset), tmp_path / "cache"))
    assert "\n" not in str(error.value)
    return str(error.value)


# Downloads.


def test_wikitext_is_downloaded_once(server, wikitext, tmp_path):
    make_wikitext_zip(server.folder / "a.zip")
    wikitext(f"{server.url}/missing/", f"{server.url}/")
    for _ in range(2):
        loaded = text.load_text("wikitext-2", tmp_path / "cache")
        assert lines_of(loaded) == SPLITS
        assert loaded.name == "wikitext-2" and loaded.english_wikitext and not loaded.note
    assert len([path for path in server.requests if path == "/a.zip"]) == 1


def test_a_damaged_wikitext_is_downloaded_again(server, wikitext, tmp_path, caplog):
    make_wikitext_zip(server.folder / "a.zip")
    wikitext()
    text.load_text("wikitext-2", tmp_path / "cache")
    path = tmp_path / "cache" / "wikitext-2.zip"
    os.truncate(path, 200)
    assert lines_of(text.load_text("wikitext-2", tmp_path / "cache")) == SPLITS
    assert len(server.requests) == 2 and str(path) in caplog.text


@pytest.mark.parametrize("name", text.WIKITEXT)
def test_what_is_asked_for_by_name_is_refused_when_no_mirror_delivers(
    wikitext, tmp_path, fake_docs, name
):
    wikitext(name=name)
    with pytest.raises(DataError, match=f"{name} could not be downloaded: .* 404"):
        text.load_text(name, tmp_path / "cache")


def test_auto_takes_wikitext_where_a_mirror_answers(server, wikitext, tmp_path, fake_docs):
    make_wikitext_zip(server.folder / "a.zip")
    wikitext()
    loaded = text.load_text("auto", tmp_path / "cache")
    assert loaded.name == "wikitext-2" and loaded.note is None and loaded.english_wikitext
    server.folder.rename(tmp_path / "gone")
    assert lines_of(text.load_text("auto", tmp_path / "cache")) == SPLITS, "cached"


def test_auto_falls_back_and_says_so(server, wikitext, tmp_path, fake_docs):
    wikitext()
    loaded = text.load_text("auto", tmp_path / "cache")
    assert loaded.name == "installed-docs" and loaded.splits == fake_docs
    assert not loaded.english_wikitext
    assert loaded.note == (
        f"wikitext-2: {server.url}/a.zip answered 404 File not found; the installed packages' "
        "docstrings are used instead"
    )


def test_auto_gives_up_silent_mirrors_soon(wikitext, tmp_path, fake_docs, monkeypatch):
    monkeypatch.setattr(text, "AUTO_SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/"
        wikitext(url, url)
        begun = time.monotonic()
        loaded = text.load_text("auto", tmp_path / "cache")
        assert time.monotonic() - begun < 25  # 30 are left to a mirror that is named
    assert "did not answer in time" in loaded.note


def test_the_archives_are_well_formed():
    assert text.AUTO_SECONDS < 10
    for name, archive in text.WIKITEXT.items():
        assert len(archive.mirrors) > 1 and len(archive.sha256) == 64
        assert archive.file_name == f"{name}-v1.zip"


# Paths.


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw.gz", "wiki.test.raw"),
        ("train.txt", "valid.txt", "test.txt"),
        ("train.txt.gz", "validation.txt", "test.txt"),
        ("contest-train.txt", "contest-validation.txt", "contest-test.txt"),
    ],
)
def test_a_folder(tmp_path, names):
    folder = tmp_path / "folder"
    folder.mkdir()
    (folder / "README").write_text("not text for training")
    (folder / "notes.txt").write_text("neither is this")
    for name, lines in zip(names, SPLITS.values(), strict=True):
        data = content(lines)
        (folder / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    loaded = text.load_text(str(folder), tmp_path / "cache")
    assert lines_of(loaded) == SPLITS and loaded.name == str(folder)
    assert loaded.english_wikitext == ("wiki" in names[0])
    assert not (tmp_path / "cache").exists()


def test_a_wikitext_zip(tmp_path):
    path = tmp_path / "some.zip"
    make_wikitext_zip(path, "wikitext-2-raw/", "raw")
    loaded = text.load_text(str(path), tmp_path / "cache")
    assert lines_of(loaded) == SPLITS and loaded.english_wikitext
    content = bytearray(path.read_bytes())
    content[70] ^= 255
    path.write_bytes(content)
    assert "damaged archive" in error_of(path, tmp_path)


LINES = [f"Line number {number} of the text." for number in range(2000)]


@pytest.mark.parametrize("name", ["my.txt", "my.txt.gz"])
def test_one_file_is_split_by_a_stable_hash(tmp_path, name):
    data = ("\ufeff" + "\r\n\r\n".join(LINES)).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    loaded = text.load_text(str(tmp_path / name), tmp_path / "cache")
    found = lines_of(loaded)
    assert sorted(itertools.chain(*found.values())) == sorted(LINES)
    assert [len(lines) for lines in found.values()] == [1780, 130, 90]
    assert found["valid"][0] == "Line number 4 of the text."
    assert not loaded.english_wikitext


def test_a_glob_has_the_split_of_one_file(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "part-1.txt").write_text("\n".join(LINES[:1000]))
    (tmp_path / "part-2.txt").write_text("\n".join(LINES[1000:]))
    one = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache")
    several = text.load_text(str(tmp_path / "part-*.txt"), tmp_path / "cache")
    assert lines_of(several) == lines_of(one)
    assert several.name == str(tmp_path / "part-*.txt") and several.sha256 == one.sha256


def test_text_sha256_sees_every_change():
    def sha256(**changed):
        return text.Text("any", {**SPLITS, **changed}, False).sha256

    digests = {
        sha256(),
        sha256(train=SPLITS["train"] + ["more"]),
        sha256(train=SPLITS["train"][::-1]),
        sha256(valid=SPLITS["test"], test=SPLITS["valid"]),
        sha256(valid=[], test=SPLITS["valid"] + SPLITS["test"]),
    }
    assert len(digests) == 5
    assert sha256() == sha256(), "and nothing else"


# Errors.


def test_an_unknown_name_or_missing_path(tmp_path):
    for dataset in ("wikitext-3", str(tmp_path / "missing"), str(tmp_path / "*.txt")):
        message = error_of(dataset, tmp_path)
        assert repr(dataset) in message
        assert "wikitext-103-raw" in message and "installed-docs" in message


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n", b"one line\n"])
def test_too_little_text(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    expected = f"{tmp_path / 'a.txt'}: no line of text for the "
    assert expected in error_of(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize("position", [0, 200_000])
def test_a_binary_file(tmp_path, position):
    data = bytearray(b"plain text\n" * 30_000)
    data[position] = 0
    (tmp_path / "a.txt").write_bytes(data)
    assert "a binary file" in error_of(tmp_path / "a.txt", tmp_path)


def test_a_bad_byte_names_its_file_and_line(tmp_path):
    (tmp_path / "a.txt").write_bytes(b"good\n\nna\xefve\n")
    assert f"{tmp_path / 'a.txt'}, line 3: byte 0xef" in error_of(tmp_path / "a.txt", tmp_path)


def test_a_damaged_gzip_file(tmp_path):
    path = tmp_path / "a.txt.gz"
    compressed = gzip.compress(os.urandom(5000).hex().encode())
    for data in (compressed[:2000], b"not compressed"):
        path.write_bytes(data)
        assert "a.txt.gz: damaged archive" in error_of(path, tmp_path)


@pytest.mark.parametrize(
    "names", [("train.txt", "test.txt"), ("a-train.txt", "b-train.txt", "valid.txt", "test.txt")]
)
def test_a_folder_that_lacks_a_split_or_is_not_clear(tmp_path, names):
    for name in names:
        (tmp_path / name).write_text("text")
    message = error_of(tmp_path, tmp_path)
    assert f"found {', '.join(sorted(names))}; expected one train, one valid" in message


def test_a_file_that_is_changed_while_it_is_in_use(tmp_path):
    """Its tokens would be stored under the checksum of what it held before."""
    path = tmp_path / "a.txt"
    path.write_text("\n".join(LINES))
    loaded = text.load_text(str(path), tmp_path / "cache")
    lines = iter(loaded.splits["train"])
    next(lines)
    path.write_text("\n".join(LINES[::-1]))
    os.utime(path, (1, 1))  # time stamps are coarse
    for reader in (lines, iter(loaded.splits["train"])):
        with pytest.raises(DataError, match="a.txt: was changed while it was in use"):
            list(reader)


def test_lines_are_not_held_in_memory(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES[:100] * 3000))  # 8 MB
    loaded = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache")
    tracemalloc.start()
    count = sum(1 for lines in loaded.splits.values() for _ in lines)
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert count == 300_000 and peak < 1_000_000


@pytest.mark.parametrize(
    "dataset",
    ["~nosuchuser/a.txt", "x" * 300, "*" * 300, "a\0b", "caf\udce9.txt", "\ud800", ""],
)
def test_what_is_no_path(tmp_path, dataset):
    error_of(dataset, tmp_path).encode()
