import hashlib
import http.server
import os
import socket
import threading
import types

import pytest
import requests

from data import download
from data.errors import DataError

BODY = bytes(range(256)) * 400
SHA256 = hashlib.sha256(BODY).hexdigest()


class Handler(http.server.BaseHTTPRequestHandler):
    def do_GET(self):
        self.server.requests.append((self.path, self.headers.get("User-Agent")))
        if self.path == "/slow":
            self.server.stopped.wait(60)
            return
        if self.path == "/403":
            self.send_error(403)
            return
        self.send_response(200)
        self.send_header("Content-Length", str(len(BODY)))
        self.end_headers()
        if self.path == "/cut":
            self.wfile.write(BODY[:50_000])
        elif self.path == "/stalled":
            self.wfile.write(BODY[:50_000])
            self.wfile.flush()
            self.server.stopped.wait(10)
        elif self.path == "/wrong":
            self.wfile.write(BODY[::-1])
        else:
            self.wfile.write(BODY)

    def log_message(self, *args):
        pass


@pytest.fixture
def server():
    server = http.server.ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.requests = []
    server.stopped = threading.Event()
    server.url = f"http://127.0.0.1:{server.server_port}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02})
    thread.start()
    yield server
    server.stopped.set()
    server.shutdown()
    thread.join()
    server.server_close()


def fetch(server, paths, target, **options):
    urls = [f"{server.url}/{path}" for path in paths]
    download.fetch(urls, SHA256, target, "the file", **options)


def visible(folder):
    return [name for name in os.listdir(folder) if not name.startswith(".lock-")]


@pytest.fixture(autouse=True)
def impatient(monkeypatch):
    monkeypatch.setattr(download, "SECONDS", (3, 1.5))


def test_a_good_answer(server, tmp_path, capfd):
    fetch(server, ["good"], tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert visible(tmp_path) == ["file"]
    ((path, agent),) = server.requests
    assert path == "/good" and agent.startswith("Mozilla")
    assert f"downloaded from {server.url}/good" in capfd.readouterr().err


FAILURES = {
    "403": "answered 403 Forbidden",
    "slow": "did not answer in time",
    "stalled": "failed (HTTPConnectionPool",
    "cut": "failed (",
    "wrong": "sent something else: sha256",
}


@pytest.mark.parametrize("path", FAILURES)
def test_the_next_mirror_is_tried_and_a_broken_download_is_thrown_away(server, tmp_path, path):
    fetch(server, [path, "good"], tmp_path / "file")
    assert (tmp_path / "file").read_bytes() == BODY
    assert [asked for asked, _ in server.requests] == [f"/{path}", "/good"]
    assert visible(tmp_path) == ["file"]


def test_all_mirrors_fail(server, tmp_path):
    with pytest.raises(DataError) as error:
        fetch(server, FAILURES, tmp_path / "file")
    message = str(error.value)
    assert "\n" not in message
    for path, reason in FAILURES.items():
        assert f"{server.url}/{path} {reason}" in message
    assert visible(tmp_path) == []


def test_without_a_network_the_reason_is_two_words(tmp_path, monkeypatch):
    def get(url, **options):
        raise requests.ConnectionError(f"{url}: [Errno -2] Name or service not known")

    monkeypatch.setattr(requests, "get", get)
    with pytest.raises(DataError, match="^it: no network$"):
        download.fetch(["https://a.b/c", "https://d.e/f"], SHA256, tmp_path / "file", what="it")


def test_mirrors_that_drop_packets_take_ten_seconds_together(tmp_path, monkeypatch):
    """The timeout to connect holds for each address of a host."""
    clock, tried = [0.0], []

    def get(url, timeout, **options):
        tried.append(url)
        clock[0] += 3 * timeout[0]
        raise requests.ConnectTimeout

    monkeypatch.setattr(requests, "get", get)
    monkeypatch.setattr(requests.utils, "get_environ_proxies", lambda url: {})
    monkeypatch.setattr(socket, "getaddrinfo", lambda *arguments, **more: [None] * 3)
    monkeypatch.setattr(download, "time", types.SimpleNamespace(monotonic=lambda: clock[0]))
    monkeypatch.setattr(download, "SECONDS", (4, 10))
    urls = [f"https://{name}.b/c" for name in "abcd"]
    with pytest.raises(DataError, match="https://d.b/c could not be reached in time"):
        download.fetch(urls, SHA256, tmp_path / "file")
    assert clock[0] == pytest.approx(10) and tried == urls[:3]


def test_there_is_no_progress_bar_without_an_answer(server, tmp_path, monkeypatch):
    shown = []
    stock = download.live_line
    monkeypatch.setattr(download, "live_line", lambda **more: shown.append(more) or stock(**more))
    fetch(server, ["403", "good"], tmp_path / "file")
    assert [bar["total"] for bar in shown] == [len(BODY)]
