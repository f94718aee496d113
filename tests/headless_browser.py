"""Drives a real browser without a window: opens a page, runs scripts in it, takes pictures of it.

It speaks Chromium's DevTools protocol. Everything the page asked for and complained of is kept.
"""

from __future__ import annotations

import base64
import json
import os
import shutil
import signal
import subprocess
import tempfile
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any

NAMES = ("chromium", "chromium-browser", "google-chrome")
_PATIENCE = 180.0


def find_browser() -> str | None:
    """The browser of this machine, if it has one."""
    return next((found for name in NAMES if (found := shutil.which(name))), None)


class Page:
    """A page in the browser."""

    def __init__(self, socket: Any) -> None:
        self._socket = socket
        self._number = 0
        self.complaints: list[str] = []
        """Errors and warnings of the console, exceptions, and what the policy refused."""
        self.requests: list[str] = []
        """Every address that was asked for."""
        for domain in ("Page", "Runtime", "Network", "Log"):
            self.ask(f"{domain}.enable")

    def open(self, url: str) -> None:
        """Go there, and wait until all of it is loaded."""
        self.ask("Page.navigate", url=url)
        # Until the new page is there, the old one answers.
        self.wait_for(f"location.href === {json.dumps(url)} && document.readyState === 'complete'")

    def run(self, expression: str) -> Any:
        """What a script's expression gives; a promise is waited for."""
        answer = self.ask(
            "Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True
        )
        if "exceptionDetails" in answer:
            raise AssertionError(f"{expression}: {answer['exceptionDetails']}")
        return answer["result"].get("value")

    def wait_for(self, expression: str) -> None:
        """Until the expression is true."""
        end = time.monotonic() + _PATIENCE
        while not self.run(expression):
            assert time.monotonic() < end, f"never true: {expression}"
            time.sleep(0.02)

    def look(self, *, width: int = 1100, height: int = 900, theme: str = "light") -> None:
        """Make the window so large, and the system light or dark."""
        self.ask(
            "Emulation.setDeviceMetricsOverride",
            width=width,
            height=height,
            deviceScaleFactor=1,
            mobile=width < 600,
        )
        self.ask(
            "Emulation.setEmulatedMedia",
            features=[{"name": "prefers-color-scheme", "value": theme}],
        )

    def picture(self, path: Path) -> None:
        """A PNG of what is in the window."""
        data = self.ask("Page.captureScreenshot", format="png")["data"]
        path.write_bytes(base64.b64decode(data))

    def ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        """A command of the protocol, and its result."""
        self._number += 1
        self._socket.send(json.dumps({"id": self._number, "method": method, "params": parameters}))
        while True:
            message = json.loads(self._socket.recv(timeout=_PATIENCE))
            if message.get("id") == self._number:
                assert "error" not in message, f"{method}: {message['error']}"
                return message["result"]
            self._heard(message.get("method", ""), message.get("params", {}))

    def _heard(self, event: str, told: dict[str, Any]) -> None:
        if event == "Network.requestWillBeSent":
            self.requests.append(told["request"]["url"])
        elif event == "Runtime.exceptionThrown":
            self.complaints.append(json.dumps(told["exceptionDetails"]))
        elif event == "Runtime.consoleAPICalled" and told["type"] in ("error", "warning"):
            self.complaints.append(json.dumps(told["args"]))
        elif event == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
            self.complaints.append(told["entry"]["text"])


@contextmanager
def browser_page(program: str) -> Iterator[Page]:
    """A page in a browser of its own, which ends with it."""
    from websockets.sync.client import connect

    with ExitStack() as stack:
        home = stack.enter_context(tempfile.TemporaryDirectory(ignore_cleanup_errors=True))
        process = _start(program, home)
        stack.callback(_end, process)
        port, path = _address(Path(home), process)
        browser = stack.enter_context(
            connect(f"ws://127.0.0.1:{port}{path}", max_size=None, proxy=None)
        )
        browser.send(
            json.dumps({"id": 1, "method": "Target.createTarget", "params": {"url": "about:blank"}})
        )
        target = json.loads(browser.recv(timeout=_PATIENCE))["result"]["targetId"]
        socket = stack.enter_context(
            connect(f"ws://127.0.0.1:{port}/devtools/page/{target}", max_size=None, proxy=None)
        )
        yield Page(socket)


def _start(program: str, home: str) -> subprocess.Popen[bytes]:
    arguments = [
        program,
        "--headless=new",
        "--remote-debugging-port=0",
        f"--user-data-dir={home}",
        "--no-first-run",
        "--disable-gpu",
        "--disable-dev-shm-usage",
        "--no-proxy-server",
        "--disable-background-networking",
        "--disable-component-update",
        "--disable-sync",
        "--disable-extensions",
        "--hide-scrollbars",
    ]
    if os.geteuid() == 0:  # its own sandbox does not start as root
        arguments.append("--no-sandbox")
    return subprocess.Popen(
        arguments,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )


def _address(home: Path, process: subprocess.Popen[bytes]) -> tuple[str, str]:
    """The port that it listens on, and the path of its own socket."""
    file = home / "DevToolsActivePort"
    end = time.monotonic() + _PATIENCE
    while time.monotonic() < end:
        assert process.poll() is None, f"the browser ended with {process.returncode}"
        lines = file.read_text().splitlines() if file.is_file() else []
        if len(lines) == 2:
            return lines[0], lines[1]
        time.sleep(0.05)
    raise AssertionError("the browser did not say where it listens")


def _end(process: subprocess.Popen[bytes]) -> None:
    """It and its children: they are a session of their own."""
    os.killpg(process.pid, signal.SIGKILL)
    process.wait()
