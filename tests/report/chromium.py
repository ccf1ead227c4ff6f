"""Drives a headless Chromium over a pipe, by its DevTools protocol."""

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
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

VARIABLE = "AUTOPAR_CHROMIUM"
NAMES = (
    "chromium",
    "chromium-browser",
    "google-chrome",
    "google-chrome-stable",
    "chrome",
)
_SECONDS = 60.0
_START = (
    "import os, sys; os.dup2(int(sys.argv[1]), 3); os.dup2(int(sys.argv[2]), 4); "
    "os.execvp(sys.argv[3], sys.argv[3:])"
)


def find_chromium() -> str | None:
    """The browser that the variable names, or the first one of PATH."""
    given = os.environ.get(VARIABLE)
    return given or next(filter(None, map(shutil.which, NAMES)), None)


@dataclass
class Tab:
    """A page in the browser; `problems` are what its console and network said."""

    to_browser: int
    from_browser: int
    session: str = ""
    problems: list[str] = field(default_factory=list)
    requests: list[str] = field(default_factory=list)
    _rest: bytes = b""
    _number: int = 0

    def call(self, method: str, **params: Any) -> dict[str, Any]:
        """The answer to one command; events on the way are noted."""
        self._number += 1
        message: dict[str, Any] = {"id": self._number, "method": method}
        message["params"] = params
        if self.session:
            message["sessionId"] = self.session
        os.write(self.to_browser, json.dumps(message).encode() + b"\0")
        end = time.monotonic() + _SECONDS
        while True:
            found = self._next(end)
            if found.get("id") == self._number:
                assert "error" not in found, f"{method}: {found['error']}"
                return found["result"]
            self._note(found)

    def value(self, expression: str) -> Any:
        """What an expression of the page's script is."""
        found = self.call(
            "Runtime.evaluate",
            expression=expression,
            returnByValue=True,
            awaitPromise=True,
        )
        assert "exceptionDetails" not in found, found["exceptionDetails"]
        return found["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Wait until an expression is true."""
        end = time.monotonic() + _SECONDS
        while not self.value(expression):
            assert time.monotonic() < end, f"{expression} stays false"
            time.sleep(0.05)

    def press(self, key: str) -> None:
        """Press a key where the focus is."""
        code = {"Enter": 13, " ": 32}[key]
        text = "\r" if key == "Enter" else key
        for kind in ("keyDown", "keyUp"):
            self.call(
                "Input.dispatchKeyEvent",
                type=kind,
                key=key,
                windowsVirtualKeyCode=code,
                text=text,
            )

    def screenshot(self, path: Path, top: float, height: float, width: int) -> None:
        """Write a part of the page as PNG."""
        clip = {"x": 0, "y": top, "width": width, "height": height, "scale": 1}
        found = self.call(
            "Page.captureScreenshot", clip=clip, captureBeyondViewport=True
        )
        path.write_bytes(base64.b64decode(found["data"]))

    def _next(self, end: float) -> dict[str, Any]:
        while b"\0" not in self._rest:
            left = end - time.monotonic()
            ready = select.select([self.from_browser], [], [], max(left, 0))[0]
            assert ready, "the browser does not answer"
            more = os.read(self.from_browser, 1 << 16)
            assert more, "the browser has ended"
            self._rest += more
        message, _, self._rest = self._rest.partition(b"\0")
        return json.loads(message)

    def _note(self, event: dict[str, Any]) -> None:
        params = event.get("params", {})
        match event.get("method"):
            case "Runtime.exceptionThrown":
                self.problems.append(json.dumps(params["exceptionDetails"]))
            case "Runtime.consoleAPICalled" if params["type"] in ("error", "warning"):
                self.problems.append(json.dumps(params["args"]))
            case "Log.entryAdded" if params["entry"]["level"] == "error":
                self.problems.append(json.dumps(params["entry"]))
            case "Network.requestWillBeSent":
                self.requests.append(params["request"]["url"])


@contextmanager
def open_page(
    chromium: str, url: str, folder: Path, width: int = 1200, height: int = 900
) -> Iterator[Tab]:
    """A page in a browser of its own, whose profile is in `folder`."""
    reading, to_browser = os.pipe()
    from_browser, writing = os.pipe()
    flags = [
        "--headless=new",
        "--remote-debugging-pipe",
        "--disable-gpu",
        "--no-first-run",
        "--hide-scrollbars",
        f"--user-data-dir={folder}",
        f"--window-size={width},{height}",
        *(["--no-sandbox"] if os.geteuid() == 0 else []),  # root has none
        "about:blank",
    ]
    # Out of the way of 3 and 4, which are where the browser looks for its pipes.
    theirs = [fcntl.fcntl(end, fcntl.F_DUPFD, 10) for end in (reading, writing)]
    browser = subprocess.Popen(
        [sys.executable, "-c", _START, *map(str, theirs), chromium, *flags],
        pass_fds=theirs,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
    )
    for end in (reading, writing, *theirs):
        os.close(end)
    try:
        tab = Tab(to_browser, from_browser)
        target = tab.call("Target.createTarget", url="about:blank")["targetId"]
        joined = tab.call("Target.attachToTarget", targetId=target, flatten=True)
        tab.session = joined["sessionId"]
        for domain in ("Runtime", "Log", "Network", "Page"):
            tab.call(f"{domain}.enable")
        tab.call("Page.navigate", url=url)
        yield tab
    finally:
        browser.kill()
        browser.wait()
        os.close(to_browser)
        os.close(from_browser)
