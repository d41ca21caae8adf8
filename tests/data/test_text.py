import gzip
import hashlib
import http.server
import io
import itertools
import os
import socket
import threading
import time
import zipfile

import pytest

from data import cache, installed_docs, paths, text
from data.errors import DataError
from tests.data.closed_paths import close

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


def archive_of(server, name="a.zip", mirrors=("a.zip",)):
    sha256 = hashlib.sha256((server.folder / name).read_bytes()).hexdigest()
    return text.Archive(tuple(f"{server.url}/{mirror}" for mirror in mirrors), sha256)


@pytest.fixture
def fake_docs(monkeypatch):
    splits = {split: [f"{split} docs"] for split in text.SPLITS}
    monkeypatch.setattr(installed_docs, "load_installed_docs", lambda cache_dir: splits)
    return splits


def error_of(dataset, tmp_path):
    with pytest.raises(DataError) as error:
        text.load_text(str(dataset), tmp_path / "cache")
    assert "\n" not in str(error.value)
    return str(error.value)


# Downloads.


def test_wikitext_is_downloaded_once(server, tmp_path):
    make_wikitext_zip(server.folder / "a.zip")
    mirrors = {"wikitext-2": archive_of(server, mirrors=("missing.zip", "a.zip"))}
    for _ in range(2):
        loaded = text.load_text("wikitext-2", tmp_path / "cache", mirrors)
        assert loaded == text.Text("wikitext-2", SPLITS, english_wikitext=True)
    assert len([path for path in server.requests if "a.zip" in path]) == 1
    assert os.listdir(tmp_path / "cache") == ["wikitext-2"]
    assert sorted(os.listdir(tmp_path / "cache" / "wikitext-2")) == [
        "SHA256SUMS",
        *(f"wiki.{split}.tokens" for split in ("test", "train", "valid")),
    ]


@pytest.mark.parametrize("damage", ["flipped", "truncated", "older"])
def test_a_damaged_wikitext_is_downloaded_again(server, tmp_path, monkeypatch, caplog, damage):
    make_wikitext_zip(server.folder / "a.zip")
    mirrors = {"wikitext-2": archive_of(server)}
    text.load_text("wikitext-2", tmp_path / "cache", mirrors)
    path = tmp_path / "cache" / "wikitext-2" / "wiki.test.tokens"
    if damage == "flipped":
        path.write_bytes(path.read_bytes().replace(b"poet", b"poem"))
    elif damage == "truncated":
        os.truncate(path, 0)
    else:
        (path.parent / "SHA256SUMS").unlink()
    monkeypatch.setattr(cache, "_verified", {})  # as in another process
    assert text.load_text("wikitext-2", tmp_path / "cache", mirrors).splits == SPLITS
    assert len(server.requests) == 2
    assert len(caplog.records) == 1 and str(path.parent) in caplog.text


def test_a_zip_that_climbs_out_leaves_nothing(server, tmp_path):
    make_wikitext_zip(server.folder / "a.zip", extra=["../../climbs"])
    with pytest.raises(DataError, match="leaves its folder"):
        text.load_text("wikitext-2", tmp_path / "cache", {"wikitext-2": archive_of(server)})
    assert os.listdir(tmp_path / "cache") == []
    assert sorted(os.listdir(tmp_path)) == ["cache", "served"]


def test_a_zip_without_a_split_leaves_nothing(server, tmp_path):
    with zipfile.ZipFile(server.folder / "a.zip", "w") as archive:
        archive.writestr("wikitext-2/wiki.train.tokens", "text")
    with pytest.raises(DataError, match="no valid and no test file"):
        text.load_text("wikitext-2", tmp_path / "cache", {"wikitext-2": archive_of(server)})
    assert os.listdir(tmp_path / "cache") == []


@pytest.mark.parametrize("name", text.wikitext_archives())
def test_what_is_asked_for_by_name_is_refused_when_no_mirror_delivers(
    server, tmp_path, fake_docs, name
):
    mirrors = {name: text.Archive((f"{server.url}/a.zip",), "0" * 64)}
    with pytest.raises(DataError, match=f"{name} could not be downloaded: .* 404"):
        text.load_text(name, tmp_path / "cache", mirrors)
    assert os.listdir(tmp_path / "cache") == []


def test_auto_takes_wikitext_where_a_mirror_answers(server, tmp_path, fake_docs):
    make_wikitext_zip(server.folder / "a.zip")
    mirrors = {"wikitext-2": archive_of(server)}
    loaded = text.load_text("auto", tmp_path / "cache", mirrors)
    assert loaded.name == "wikitext-2" and loaded.note is None and loaded.english_wikitext
    nowhere = {"wikitext-2": text.Archive((), "")}
    assert text.load_text("auto", tmp_path / "cache", nowhere) == loaded, "cached"


def test_auto_falls_back_and_says_so(server, tmp_path, fake_docs):
    mirrors = {"wikitext-2": text.Archive((f"{server.url}/a.zip",), "0" * 64)}
    loaded = text.load_text("auto", tmp_path / "cache", mirrors)
    assert loaded.name == "installed-docs" and loaded.splits == fake_docs
    assert not loaded.english_wikitext
    host = server.url.removeprefix("http://")
    assert loaded.note == (
        f"wikitext-2: {host} answered 404 File not found; the installed packages' docstrings are "
        "used instead"
    )


def test_auto_gives_up_silent_mirrors_soon(tmp_path, fake_docs, monkeypatch):
    monkeypatch.setattr(text, "AUTO_SECONDS", 0.4)
    with socket.create_server(("127.0.0.1", 0)) as silent:
        url = f"http://127.0.0.1:{silent.getsockname()[1]}/a.zip"
        begun = time.monotonic()
        loaded = text.load_text(
            "auto", tmp_path / "cache", {"wikitext-2": text.Archive((url, url), "0" * 64)}
        )
        assert time.monotonic() - begun < 25  # 30 are left to a mirror that is named
    assert "sent no data" in loaded.note


def test_the_archives_are_well_formed():
    archives = text.wikitext_archives()
    assert text.AUTO_SECONDS < 10
    assert list(archives) == ["wikitext-2", "wikitext-2-raw", "wikitext-103", "wikitext-103-raw"]
    for name, archive in archives.items():
        assert len(archive.urls) > 1 and len(archive.sha256) == 64
        assert all(
            url.endswith(f"/{name.removesuffix('-raw')}-raw-v1.zip") or "raw" not in name
            for url in archive.urls
        )


# Paths.


@pytest.mark.parametrize(
    "names",
    [
        ("wiki.train.tokens", "wiki.valid.tokens", "wiki.test.tokens"),
        ("wiki.train.raw", "wiki.valid.raw.gz", "wiki.test.raw"),
        ("train.txt", "valid.txt", "test.txt"),
        ("train.txt.gz", "validation.txt", "test.txt"),
        ("contest-train.txt", "contest-validation.txt", "contest-test.txt"),
        ("mytraining.txt", "myvalid.txt", "mytest.txt"),
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
    assert loaded == text.Text(str(folder), SPLITS, english_wikitext="wiki" in names[0])
    assert not (tmp_path / "cache").exists()


def test_tokens_win_over_raw(tmp_path):
    for split, lines in SPLITS.items():
        (tmp_path / f"wiki.{split}.tokens").write_bytes(content(lines))
        (tmp_path / f"wiki.{split}.raw").write_text("raw")
    assert text.load_text(str(tmp_path), tmp_path / "cache").splits == SPLITS


def test_a_wikitext_zip(tmp_path):
    path = tmp_path / "some.zip"
    make_wikitext_zip(path, "wikitext-2-raw/", "raw")
    loaded = text.load_text(str(path), tmp_path / "cache")
    assert loaded == text.Text(str(path), SPLITS, english_wikitext=True)
    make_wikitext_zip(path, extra=["../climbs"])
    assert "leaves its folder" in error_of(path, tmp_path)
    path.write_bytes(path.read_bytes()[:100])
    assert "damaged zip archive" in error_of(path, tmp_path)


LINES = [f"Line number {number} of the text." for number in range(2000)]


@pytest.mark.parametrize("name", ["my.txt", "my.txt.gz"])
def test_one_file_is_split_by_a_stable_hash(tmp_path, name):
    data = ("\ufeff" + "\r\n\r\n".join(LINES)).encode()
    (tmp_path / name).write_bytes(gzip.compress(data) if name.endswith(".gz") else data)
    loaded = text.load_text(str(tmp_path / name), tmp_path / "cache")
    assert sorted(itertools.chain(*loaded.splits.values())) == sorted(LINES)
    assert {split: len(lines) for split, lines in loaded.splits.items()} == {
        "train": 1780,
        "valid": 130,
        "test": 90,
    }
    assert loaded.splits["valid"][0] == "Line number 4 of the text."
    assert not loaded.english_wikitext


def test_one_wikitext_file_is_wikitext(tmp_path):
    (tmp_path / "wiki.valid.tokens").write_text("\n".join(LINES))
    assert text.load_text(str(tmp_path / "wiki.valid.tokens"), tmp_path).english_wikitext


def test_a_glob_has_the_split_of_one_file(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    (tmp_path / "part-1.txt").write_text("\n".join(LINES[:1000]))
    (tmp_path / "part-2.txt").write_text("\n".join(LINES[1000:]))
    one = text.load_text(str(tmp_path / "a.txt"), tmp_path / "cache")
    several = text.load_text(str(tmp_path / "part-*.txt"), tmp_path / "cache")
    assert several.splits == one.splits
    assert several.name == str(tmp_path / "part-*.txt")
    assert text.text_sha256(several) == text.text_sha256(one)


def test_text_sha256_sees_every_change():
    def sha256(**changed):
        return text.text_sha256(text.Text("any", {**SPLITS, **changed}, False))

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
    for dataset in ("wikitext-3", "", str(tmp_path / "missing")):
        message = error_of(dataset, tmp_path)
        assert repr(dataset) in message
        assert "wikitext-103-raw" in message and "installed-docs" in message
    assert "no file matches" in error_of(tmp_path / "*.txt", tmp_path)


@pytest.mark.parametrize("data", [b"", b"\n \n\t\n"])
def test_an_empty_file(tmp_path, data):
    (tmp_path / "a.txt").write_bytes(data)
    assert f"{tmp_path / 'a.txt'}: empty" in error_of(tmp_path / "a.txt", tmp_path)


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
    for data in (compressed[:2000], b"not compressed", b""):
        path.write_bytes(data)
        message = error_of(path, tmp_path)
        assert "damaged gzip file" in message or (data == b"" and "empty" in message)


def test_a_folder_that_lacks_a_split(tmp_path):
    (tmp_path / "train.txt").write_text("text")
    (tmp_path / "test.txt").write_text("text")
    assert "no valid file; expected train, valid and test" in error_of(tmp_path, tmp_path)


def test_a_folder_that_is_not_clear(tmp_path):
    for name in ("a-train.txt", "b-train.txt", "valid.txt", "test.txt"):
        (tmp_path / name).write_text("text")
    message = error_of(tmp_path, tmp_path)
    assert "not clear which of a-train.txt, b-train.txt, test.txt, valid.txt" in message


def test_a_file_too_small_to_split(tmp_path):
    (tmp_path / "a.txt").write_text("one line\nand another\n")
    assert "too small to be split 90/5/5: of 2 lines" in error_of(tmp_path / "a.txt", tmp_path)


@pytest.mark.parametrize(
    "dataset",
    ["~nosuchuser/a.txt", "x" * 300, "*" * 300, "a\0b", "caf\udce9.txt", "\ud800", "/dev/null", ""],
)
def test_what_is_no_path(tmp_path, dataset):
    error_of(dataset, tmp_path).encode()


@pytest.mark.parametrize("name", ["a.txt", "a.txt.gz", "a.zip"])
def test_a_file_that_cannot_be_read(tmp_path, monkeypatch, name):
    make_wikitext_zip(tmp_path / name)
    close(tmp_path / name, monkeypatch)
    message = error_of(tmp_path / name, tmp_path)
    assert name in message and "Permission denied" in message
    assert "Permission denied" in error_of(tmp_path / "a*", tmp_path)


@pytest.mark.parametrize("pattern", ["", "*.txt", "train.txt"])
def test_a_folder_that_cannot_be_read(tmp_path, monkeypatch, pattern):
    (tmp_path / "folder").mkdir()
    for split in text.SPLITS:
        (tmp_path / "folder" / f"{split}.txt").write_text("text")
    close(tmp_path / "folder", monkeypatch)
    assert "Permission denied" in error_of(tmp_path / "folder" / pattern, tmp_path)


def test_one_file_of_a_folder_that_cannot_be_read(tmp_path, monkeypatch):
    for split in text.SPLITS:
        (tmp_path / f"{split}.txt").write_text("text")
    close(tmp_path / "valid.txt", monkeypatch)
    assert "valid.txt: cannot be read (Permission denied)" in error_of(tmp_path, tmp_path)


def test_a_glob_through_links_to_the_folder_itself(tmp_path):
    (tmp_path / "a.txt").write_text("\n".join(LINES))
    expected = text.load_text(str(tmp_path / "a.txt"), tmp_path).splits
    for number in range(3):
        (tmp_path / f"link{number}").symlink_to(".")
    loaded = text.load_text(str(tmp_path / "**" / "*.txt"), tmp_path)
    assert loaded.splits == expected, "each line once"


# Bombs. Small ones: what is allowed is made smaller, too.


@pytest.fixture
def little_room(monkeypatch):
    monkeypatch.setattr(paths, "UNPACKED_BYTES", 100_000)


BOMBS = {"lines": b"the same line again\n" * 10_000, "one line": b"again " * 40_000}


@pytest.mark.parametrize("bomb", BOMBS)
def test_a_gzip_bomb(tmp_path, little_room, monkeypatch, bomb):
    packed = gzip.compress(BOMBS[bomb])
    (tmp_path / "a.txt.gz").write_bytes(packed)
    message = error_of(tmp_path / "a.txt.gz", tmp_path)
    assert f"{len(packed):,} bytes that unpack to more than 100,000" in message
    monkeypatch.setattr(paths, "UNPACKED_RATIO", 1000)
    assert "too small to be split" in error_of(tmp_path / "a.txt.gz", tmp_path)


def test_a_bomb_of_one_line_is_not_read_to_its_end(little_room):
    stream = io.BytesIO(b"again " * 400_000)
    with pytest.raises(DataError, match="unpack to more than 100,000"):
        text._read_lines(stream, "a.txt.gz", packed=700)
    assert stream.tell() <= 100_001


def test_a_zip_bomb(server, tmp_path, little_room):
    for path in (tmp_path / "a.zip", server.folder / "a.zip"):
        with zipfile.ZipFile(path, "w", zipfile.ZIP_DEFLATED) as archive:
            for split in text.SPLITS:
                archive.writestr(f"wiki.{split}.tokens", BOMBS["lines"])
    assert "unpack to 600,000, expected at most 100,000" in error_of(tmp_path / "a.zip", tmp_path)
    with pytest.raises(DataError, match="unpack to 600,000"):
        text.load_text("wikitext-2", tmp_path / "cache", {"wikitext-2": archive_of(server)})
    assert os.listdir(tmp_path / "cache") == []


def test_what_else_lies_in_a_zip_does_not_count(tmp_path, little_room):
    make_wikitext_zip(tmp_path / "a.zip")
    with zipfile.ZipFile(tmp_path / "a.zip", "a", zipfile.ZIP_DEFLATED) as archive:
        archive.writestr("picture.raw", bytes(500_000))
    assert text.load_text(str(tmp_path / "a.zip"), tmp_path / "cache").splits == SPLITS
