"""A headless Chromium for tests of pages: what it shows, its console, and its network requests."""

from __future__ import annotations

import base64
import fcntl
import json
import os
import select
import shutil
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

CHROMIUM = shutil.which("chromium") or shutil.which("google-chrome")
SECONDS = 240.0
DRAWN = "document.body && document.body.dataset.drawn"
LOADED = "document.readyState === 'complete' && location.href !== 'about:blank'"
# Chromium uses descriptors 3 and 4 for its protocol.
START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); os.execv(sys.argv[3], sys.argv[3:])"
)


class Page:
    """An open page.

    Attributes:
        problems: errors and warnings of its console, and exceptions.
        requests: URLs that it has requested.
    """

    def __init__(self, to: int, back: int) -> None:
        self._to, self._back = to, back
        self._unread = b""
        self._number = 0
        self._session: str | None = None
        self.problems: list[str] = []
        self.requests: list[str] = []

    def call(self, method: str, **params: object) -> Any:
        """Call a method of the DevTools protocol."""
        self._number += 1
        session = {} if self._session is None else {"sessionId": self._session}
        message = {"id": self._number, "method": method, "params": params, **session}
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while True:
            answer = self._read()
            if answer.get("id") == self._number:
                assert "error" not in answer, answer["error"]
                return answer["result"]

    def evaluate(self, expression: str) -> Any:
        """Return the value of a JavaScript expression, or of its promise."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def open(self, path: Path, *, dark: bool, width: int, ready: str) -> None:
        """Open a page and wait until it is ready."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        self._session = self.call("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            self.call(f"{domain}.enable")
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Emulation.setDeviceMetricsOverride", width=width, height=900, deviceScaleFactor=1, mobile=False)
        self.call("Page.navigate", url=path.as_uri())
        until = time.monotonic() + SECONDS
        while not self.evaluate(ready):
            assert time.monotonic() < until, "the page draws nothing"
            assert not self.problems, self.problems
            time.sleep(0.05)

    def screenshot(self, path: Path) -> None:
        """Write the whole page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True, optimizeForSpeed=False)
        path.write_bytes(base64.b64decode(found["data"]))

    def _read(self) -> dict[str, Any]:
        until = time.monotonic() + SECONDS
        while b"\0" not in self._unread:
            assert select.select([self._back], [], [], max(0.0, until - time.monotonic()))[0], "the browser is silent"
            part = os.read(self._back, 1 << 16)
            assert part, "the browser has ended"
            self._unread += part
        line, _, self._unread = self._unread.partition(b"\0")
        message: dict[str, Any] = json.loads(line)
        params = message.get("params", {})
        if message.get("method") == "Network.requestWillBeSent":
            self.requests.append(params["request"]["url"])
        elif message.get("method") == "Runtime.exceptionThrown":
            self.problems.append(json.dumps(params["exceptionDetails"]))
        elif message.get("method") == "Log.entryAdded":
            self.problems.append(params["entry"]["text"])
        elif message.get("method") == "Runtime.consoleAPICalled" and params["type"] in {"error", "warning", "assert"}:
            self.problems.append(json.dumps(params["args"]))
        return message


def pipe() -> list[int]:
    """Return a pipe whose descriptors are not the ones that the browser uses."""
    ends = os.pipe()
    high = [fcntl.fcntl(end, fcntl.F_DUPFD_CLOEXEC, 10) for end in ends]
    for end in ends:
        os.close(end)
    return high


@contextmanager
def browser_page(
    path: Path, profile: Path, *, dark: bool = False, width: int = 1280, ready: str = DRAWN
) -> Iterator[Page]:
    """Open a file in a headless Chromium.

    Args:
        path: path of the page.
        profile: an empty folder for the browser.
        dark: whether `prefers-color-scheme` is dark.
        width: width of the window, in pixels.
        ready: JavaScript that is true once the page is ready.
    """
    assert CHROMIUM is not None
    (theirs_in, to), (back, theirs_out) = pipe(), pipe()
    command = [CHROMIUM, "--headless", "--disable-gpu", "--remote-debugging-pipe", "--no-first-run"]
    command += [f"--user-data-dir={profile}", "--disable-background-networking", "--disable-dev-shm-usage"]
    command += ["--no-sandbox"] if os.geteuid() == 0 else []
    start = [sys.executable, "-c", START, str(theirs_in), str(theirs_out), *command]
    process = subprocess.Popen(
        start, pass_fds=(theirs_in, theirs_out), stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    os.close(theirs_in)
    os.close(theirs_out)
    try:
        page = Page(to, back)
        page.open(path, dark=dark, width=width, ready=ready)
        yield page
    finally:
        os.close(to)  # it ends with its pipe
        try:
            process.wait(20)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
        os.close(back)
