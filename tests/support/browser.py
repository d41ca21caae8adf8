"""A headless Chromium, told what to do by its own driver (the W3C WebDriver protocol)."""

import base64
import contextlib
import json
import os
import re
import shutil
import signal
import subprocess
import tempfile
import threading
import time
import urllib.request
from collections.abc import Iterator

FLAGS = (
    *("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run"),
    *("--disable-background-networking", "--disable-component-update", "--disable-sync"),
    *("--hide-scrollbars", "--force-device-scale-factor=1", "--no-proxy-server"),
)
STARTS = 120  # seconds, at most
# All that can be read on the page, also within its components.
TEXT = """
const found = [];
const walk = (node) => {
  if (['SCRIPT', 'STYLE', 'TEMPLATE'].includes(node.tagName)) return;
  if (node.nodeType === Node.TEXT_NODE) found.push(node.data);
  if (node.shadowRoot) walk(node.shadowRoot);
  node.childNodes.forEach(walk);
};
walk(document.body);
return found.join(' ');
"""
_opener = urllib.request.build_opener(urllib.request.ProxyHandler({}))


def missing() -> str | None:
    """What is not installed of a browser, in words; None where all is there."""
    if chromium() is None:
        return "no Chromium is installed (Debian: chromium)"
    if shutil.which("chromedriver") is None:
        return "no chromedriver is installed (Debian: chromium-driver)"
    return None


def chromium() -> str | None:
    """Where the browser lies."""
    names = ("chromium", "chromium-browser", "google-chrome")
    return next(filter(None, map(shutil.which, names)), None)


class Browser:
    """A browser with one page."""

    def __init__(self, driver: str, width: int, height: int, profile: str):
        self._driver = driver
        options = {
            "binary": chromium(),
            "args": [*FLAGS, f"--window-size={width},{height}", f"--user-data-dir={profile}"],
        }
        wanted = {"browserName": "chrome", "goog:chromeOptions": options}
        made = self._call("POST", "/session", {"capabilities": {"alwaysMatch": wanted}})
        self._session = f"/session/{made['sessionId']}"

    def _call(self, method: str, path: str, content: dict | None = None):
        data = None if content is None else json.dumps(content).encode()
        headers = {"Content-Type": "application/json"}
        request = urllib.request.Request(self._driver + path, data, headers, method=method)
        with _opener.open(request, timeout=STARTS) as answer:
            return json.load(answer)["value"]

    def close(self) -> None:
        """Ends the browser, and what it started."""
        with contextlib.suppress(OSError):
            self._call("DELETE", self._session)

    def open(self, url: str) -> None:
        """Opens an address anew, also where only what follows its # is another."""
        self._call("POST", self._session + "/url", {"url": "about:blank"})
        self._call("POST", self._session + "/url", {"url": url})

    def run(self, script: str):
        """What some JavaScript returns."""
        return self._call("POST", self._session + "/execute/sync", {"script": script, "args": []})

    def wait_for(self, *texts: str) -> None:
        """Waits until all of these can be read on the page."""
        end = time.monotonic() + STARTS
        while not all(text in (seen := self.run(TEXT)) for text in texts):
            assert time.monotonic() < end, f"of {texts} the page shows only: {seen[:3000]}"
            time.sleep(0.2)

    def screenshot(self) -> bytes:
        """A PNG of what is seen."""
        return base64.b64decode(self._call("GET", self._session + "/screenshot"))


@contextlib.contextmanager
def browser(width: int = 1280, height: int = 900) -> Iterator[Browser]:
    """A browser with an empty profile, which is killed afterwards, and its profile removed."""
    process = subprocess.Popen(
        ["chromedriver", "--port=0"],
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    )
    timer = threading.Timer(STARTS, process.kill)
    timer.start()
    profile = tempfile.mkdtemp(prefix="chromium-")
    try:
        for line in process.stdout:
            if found := re.search(r"successfully on port (\d+)", line):
                break
        else:
            raise AssertionError("chromedriver does not start")
        timer.cancel()
        threading.Thread(target=process.stdout.read, daemon=True).start()
        opened = Browser(f"http://127.0.0.1:{found[1]}", width, height, profile)
        try:
            yield opened
        finally:
            opened.close()
    finally:
        timer.cancel()
        with contextlib.suppress(ProcessLookupError):
            os.killpg(process.pid, signal.SIGKILL)  # the browser is of its session
        process.wait()
        shutil.rmtree(profile, ignore_errors=True)
