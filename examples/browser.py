"""A headless Chromium for tests and pictures, driven over its debugging pipe: no driver program, package or port.

In: a page's file. Out: what the page shows and does: values of expressions, key presses, pictures, and everything that
went wrong in it (exceptions, console errors, refusals of its Content-Security-Policy, requests it made).
"""

import base64
import json
import os
import select
import shutil
import subprocess
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
FLAGS = (
    "--headless --no-sandbox --disable-gpu --disable-quic --no-first-run --disable-background-networking "
    "--disable-component-update --disable-sync --disable-dev-shm-usage --hide-scrollbars --remote-debugging-pipe"
).split()
DEADLINE_S = 60


class Browser:
    """One Chromium with one page; `profile` is a new, empty folder. A context manager that ends it."""

    def __init__(self, profile: Path, width: int = 1400, height: int = 900):
        assert PROGRAM, "no chromium"
        to_browser, self.write_end = os.pipe()
        self.read_end, from_browser = os.pipe()

        def wire() -> None:  # Chromium reads commands from 3 and writes to 4
            os.dup2(to_browser, 100)
            os.dup2(from_browser, 101)
            os.dup2(100, 3)
            os.dup2(101, 4)

        self.process = subprocess.Popen(
            [PROGRAM, *FLAGS, f"--user-data-dir={profile}", f"--window-size={width},{height}", "about:blank"],
            preexec_fn=wire, close_fds=False, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_browser)
        os.close(from_browser)
        self.buffer = b""
        self.number = 0
        self.events: list[dict[str, Any]] = []
        self.session = ""
        targets = self.call("Target.getTargets")["targetInfos"]
        page = next(target["targetId"] for target in targets if target["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=page, flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def __enter__(self) -> "Browser":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.terminate()
        try:
            self.process.wait(10)
        except subprocess.TimeoutExpired:
            self.process.kill()
            self.process.wait()
        os.close(self.write_end)
        os.close(self.read_end)

    def call(self, method: str, **parameters: Any) -> dict[str, Any]:
        """One command of the DevTools protocol and its result."""
        self.number += 1
        message = {"id": self.number, "method": method, "params": parameters}
        if self.session:
            message["sessionId"] = self.session
        data = json.dumps(message).encode() + b"\0"
        while data:
            data = data[os.write(self.write_end, data) :]
        while True:
            answer = self._receive()
            if answer.get("id") == self.number:
                assert "error" not in answer, f"{method}: {answer['error']}"
                return answer["result"]
            self.events.append(answer)

    def _receive(self) -> dict[str, Any]:
        while b"\0" not in self.buffer:
            assert select.select([self.read_end], [], [], DEADLINE_S)[0], f"chromium says nothing for {DEADLINE_S} s"
            part = os.read(self.read_end, 1 << 20)
            assert part, "chromium has ended"
            self.buffer += part
        message, _, self.buffer = self.buffer.partition(b"\0")
        return json.loads(message)

    def open(self, file: Path) -> None:
        self.events.clear()
        self.call("Page.navigate", url=file.as_uri())
        self.wait_for(lambda: self.value("document.readyState === 'complete' && location.href !== 'about:blank'"))

    def value(self, expression: str) -> Any:
        """What an expression gives, as JSON."""
        found = self.call("Runtime.evaluate", expression=expression, returnByValue=True, awaitPromise=True)
        assert "exceptionDetails" not in found, f"{expression}: {found['exceptionDetails']}"
        return found["result"].get("value")

    def wait_for(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert time.monotonic() < deadline, f"not within {DEADLINE_S} s"
            time.sleep(0.02)

    def type_into(self, selector: str, text: str) -> None:
        """Replaces the text of an input as a person would."""
        self.value(f"(e => {{ e.focus(); e.select(); }})(document.querySelector({json.dumps(selector)}))")
        if text:
            self.call("Input.insertText", text=text)
        else:
            for kind in ("keyDown", "keyUp"):
                self.call("Input.dispatchKeyEvent", type=kind, key="Backspace", windowsVirtualKeyCode=8)

    def choose(self, selector: str, value: str) -> None:
        """Picks an option of a select."""
        self.value(
            f"(e => {{ e.value = {json.dumps(value)}; e.dispatchEvent(new Event('change')); }})"
            f"(document.querySelector({json.dumps(selector)}))"
        )

    def mouse(self, kind: str, x: float, y: float, **more: Any) -> None:
        self.call("Input.dispatchMouseEvent", type=kind, x=x, y=y, **more)

    def picture(self, file: Path, whole: bool = False) -> None:
        shot = self.call("Page.captureScreenshot", format="png", captureBeyondViewport=whole)
        file.write_bytes(base64.b64decode(shot["data"]))

    def complaints(self) -> list[str]:
        """Exceptions, errors on the console, refusals by the policy, dialogs, and requests other than for files."""
        self.value("1")  # whatever has happened so far is here before this answer
        found = []
        for event in self.events:
            method, told = event["method"], event["params"]
            if method == "Runtime.exceptionThrown":
                found.append(f"exception: {told['exceptionDetails']}")
            elif method == "Runtime.consoleAPICalled" and told["type"] in ("error", "assert"):
                found.append(f"console: {told['args']}")
            elif method == "Log.entryAdded" and told["entry"]["level"] in ("error", "warning"):
                found.append(f"log: {told['entry']['text']}")
            elif method == "Page.javascriptDialogOpening":
                found.append(f"dialog: {told['message']}")
            elif method == "Network.requestWillBeSent" and not told["request"]["url"].startswith("file://"):
                found.append(f"request: {told['request']['url'][:200]}")
        return found
