"""The novels come from a commit of a repository, here of one that a server on loopback has."""

import http.server
import os
import subprocess
import threading

import pytest

from data import novels, text
from data.errors import DataError

TEI = """<?xml version="1.0" encoding="UTF-8"?>
<TEI xmlns="http://www.tei-c.org/ns/1.0"><teiHeader><encodingDesc><p>markup</p></encodingDesc>
</teiHeader><text><front><div><p>Title page</p></div></front><body><div type="chapter">
<head>CHAPTER I</head>{body}</div></body><back><div><p>Advertisement</p></div></back></text></TEI>
"""
BODY = """<p>The {name} was
   <pb n="10"/> a <hi>very</hi> <foreign>élite</foreign> novel &amp; long.</p>
<p>  </p>
<quote><l>A line of verse,</l><l>and another.</l></quote>
<p>Said he: <l>one more</l> verse.</p>"""
LINES = ["A line of verse,", "and another.", "Said he: one more verse."]


class Handler(http.server.BaseHTTPRequestHandler):
    """Answers as git's own server program."""

    def do_GET(self):
        path, _, query = self.path.partition("?")
        length = int(self.headers.get("Content-Length", 0))
        environment = os.environ | {
            "GIT_PROJECT_ROOT": str(self.server.folder),
            "GIT_HTTP_EXPORT_ALL": "1",
            "REQUEST_METHOD": self.command,
            "PATH_INFO": path,
            "QUERY_STRING": query,
            "CONTENT_TYPE": self.headers.get("Content-Type", ""),
            "CONTENT_LENGTH": str(length),
            "HTTP_CONTENT_ENCODING": self.headers.get("Content-Encoding", ""),
            "GIT_PROTOCOL": self.headers.get("Git-Protocol", ""),
        }
        answer = subprocess.run(
            ["git", "http-backend"],
            env=environment,
            input=self.rfile.read(length),
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            check=False,  # it also answers where it fails
        ).stdout
        head, _, body = answer.partition(b"\r\n\r\n")
        headers = dict(line.split(": ", 1) for line in head.decode().split("\r\n"))
        self.send_response(int(headers.pop("Status", "200").split()[0]))
        for name, value in headers.items():
            self.send_header(name, value)
        self.end_headers()
        self.wfile.write(body)

    do_POST = do_GET

    def log_message(self, *args):
        pass


def git(folder, *words):
    name = ["-c", "user.name=t", "-c", "user.email=t@localhost"]
    done = subprocess.run(
        ["git", "-C", folder, *name, *words], check=True, stdout=subprocess.PIPE, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch):
    """A repository with the validation novels and two others; returns its folder."""
    folder = tmp_path / "server" / "novels.git"
    (folder / "level1").mkdir(parents=True)
    git(folder, "init", "--quiet")
    for name in (*novels.VALIDATION, "ENG18551_Trollope", "ENG18400_Trollope"):
        content = TEI.format(body=BODY.format(name=name))
        (folder / "level1" / f"{name}.xml").write_text(content, encoding="utf-8")
    (folder / "README.md").write_text("not a novel")
    commit(folder, monkeypatch)
    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.folder = folder.parent
        threading.Thread(target=server.serve_forever, daemon=True).start()
        monkeypatch.setattr(
            novels, "REPOSITORY", f"http://127.0.0.1:{server.server_port}/novels.git"
        )
        yield folder
        server.shutdown()


def commit(folder, monkeypatch):
    git(folder, "add", ".")
    git(folder, "commit", "--quiet", "-m", "novels")
    monkeypatch.setattr(novels, "COMMIT", git(folder, "rev-parse", "HEAD"))


def first(name):
    return f"The {name} was a very élite novel & long."


def test_the_paragraphs_of_the_bodies_by_split(repository, tmp_path, capfd):
    loaded = text.load_text("novels", tmp_path / "cache")
    lines = {split: list(lines) for split, lines in loaded.splits.items()}
    valid = [line for name in novels.VALIDATION for line in (first(name), *LINES)]
    assert lines["valid"] == valid
    # The last twentieth of the lines, at least one, is the test split.
    train = [first("ENG18400_Trollope"), *LINES, first("ENG18551_Trollope"), *LINES]
    assert lines["train"] + lines["test"] == train and len(lines["test"]) == 1
    assert loaded.name == "novels"
    assert f"fetching {novels.REPOSITORY}" in capfd.readouterr().err


def test_the_second_time_nothing_is_fetched(repository, tmp_path, monkeypatch):
    folder = novels.fetch_novels(tmp_path / "cache")
    assert sorted(path.name for path in folder.iterdir()) == [
        "SHA256SUMS",
        "train.txt",
        "valid.txt",
    ]
    monkeypatch.setattr(novels, "_git", None)
    assert novels.fetch_novels(tmp_path / "cache") == folder


def test_only_the_commit_is_taken(repository, tmp_path, monkeypatch):
    """A later commit of the repository changes nothing."""
    wanted = novels.COMMIT
    extra = repository / "level1" / "ENG19990_New.xml"
    extra.write_text(TEI.format(body="<p>Later.</p>"))
    commit(repository, monkeypatch)
    monkeypatch.setattr(novels, "COMMIT", wanted)
    folder = novels.fetch_novels(tmp_path / "cache")
    assert "Later." not in (folder / "train.txt").read_text(encoding="utf-8")


def error_of(tmp_path):
    with pytest.raises(DataError) as error:
        novels.fetch_novels(tmp_path / "cache")
    assert not [path for path in (tmp_path / "cache").iterdir() if path.name[0] != "."]
    message = str(error.value)
    assert message.startswith("novels: ") and "\n" not in message
    return message


def test_a_commit_that_the_server_does_not_have(repository, tmp_path, monkeypatch):
    monkeypatch.setattr(novels, "COMMIT", "0123456789" * 4)
    message = error_of(tmp_path)
    assert "0123456789" in message and "or pass a folder with train.txt and valid.txt" in message


def test_without_a_network(tmp_path, monkeypatch):
    program = tmp_path / "git"
    said = "fatal: unable to access 'https://a/': Could not resolve host: a"
    program.write_text(f'#!/bin/sh\necho "{said}" >&2\nexit 128\n')
    program.chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    assert error_of(tmp_path).startswith("novels: no network; or pass a folder")


def test_without_git(repository, tmp_path, monkeypatch):
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "git is not installed" in error_of(tmp_path)


@pytest.mark.parametrize(
    "content, message",
    [("<TEI", "ENG18551_Trollope.xml is not XML"), ("<TEI/>", "ENG18551_Trollope.xml has no body")],
)
def test_a_file_that_is_no_novel(repository, tmp_path, monkeypatch, content, message):
    (repository / "level1" / "ENG18551_Trollope.xml").write_text(content)
    commit(repository, monkeypatch)
    assert message in error_of(tmp_path)


def test_a_validation_novel_is_missing(repository, tmp_path, monkeypatch):
    (repository / "level1" / f"{novels.VALIDATION[0]}.xml").unlink()
    commit(repository, monkeypatch)
    assert f"no {novels.VALIDATION[0]}" in error_of(tmp_path)
