"""A real browser for tests: headless Chromium, driven over the pipe of its DevTools protocol, without more packages."""

from __future__ import annotations

import base64
import itertools
import json
import os
import select
import shutil
import signal
import subprocess
import time
from pathlib import Path

CHROMIUM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")


class Browser:
    """One window with one page. `problems` gathers what a console would show: exceptions, errors, refused loads."""

    def __init__(self, profile: Path, width: int = 1280, height: int = 1000):
        (theirs_in, self.into), (self.out, theirs_out) = os.pipe(), os.pipe()
        options = f"--headless --no-sandbox --disable-gpu --remote-debugging-pipe --window-size={width},{height}"
        command = [CHROMIUM, *options.split(), f"--user-data-dir={profile}", "about:blank"]
        shell = f'exec "$0" "$@" 3<&{theirs_in} 4>&{theirs_out}'  # the protocol's two ends, by number
        quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "stdin": subprocess.DEVNULL}
        pipes = {"pass_fds": (theirs_in, theirs_out), "start_new_session": True}
        self.process = subprocess.Popen(["bash", "-c", shell, *command], **pipes, **quiet)
        os.close(theirs_in)
        os.close(theirs_out)
        self.numbers, self.unread, self.session, self.problems = itertools.count(1), b"", None, []
        (target,) = (t for t in self.call("Target.getTargets")["targetInfos"] if t["type"] == "page")
        self.session = self.call("Target.attachToTarget", targetId=target["targetId"], flatten=True)["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def close(self) -> None:
        """End the browser and all of its processes."""
        os.killpg(self.process.pid, signal.SIGKILL)
        self.process.wait()
        os.close(self.into)
        os.close(self.out)

    def message(self, seconds: float = 30) -> dict:
        """The next message of the browser; TimeoutError if none comes."""
        until = time.monotonic() + seconds
        while b"\0" not in self.unread:
            if not select.select([self.out], [], [], max(0, until - time.monotonic()))[0]:
                raise TimeoutError(f"the browser said nothing for {seconds} s")
            self.unread += os.read(self.out, 1 << 20)
        text, self.unread = self.unread.split(b"\0", 1)
        said = json.loads(text)
        if said.get("method") in ("Runtime.exceptionThrown", "Runtime.consoleAPICalled", "Log.entryAdded"):
            self.problems.append(said["params"])
        if said.get("method") == "Network.requestWillBeSent":
            url = said["params"]["request"]["url"]
            if not url.startswith(("file:", "data:")):
                self.problems.append(url)
        return said

    def call(self, method: str, **parameters) -> dict:
        """The answer to one command of the protocol."""
        number = next(self.numbers)
        command = {"id": number, "method": method, "params": parameters}
        if self.session:
            command["sessionId"] = self.session
        os.write(self.into, json.dumps(command).encode() + b"\0")
        while (said := self.message()).get("id") != number:
            pass
        if "error" in said:
            raise ValueError(f"{method}: {said['error']}")
        return said["result"]

    def open(self, file: Path, anchor: str = "") -> float:
        """Show a page; the seconds until it was loaded, its script run."""
        self.call("Page.navigate", url="about:blank")
        began = time.monotonic()
        self.call("Page.navigate", url=file.resolve().as_uri() + anchor)
        while self.message().get("method") != "Page.loadEventFired":
            pass
        self.run("document.readyState")
        return time.monotonic() - began

    def run(self, script: str):
        """The value of an expression in the page; ValueError for one that throws."""
        said = self.call("Runtime.evaluate", expression=script, returnByValue=True, awaitPromise=True)
        if "exceptionDetails" in said:
            raise ValueError(f"{script}: {said['exceptionDetails']}")
        return said["result"].get("value")

    def point(self, selector: str, click: bool = False, x: float = 0.5, y: float = 0.5) -> None:
        """Move the mouse to a place in an element (shares of its width and height), and click there if wanted."""
        box = self.run(
            f"(() => {{ const node = document.querySelector({json.dumps(selector)}); "
            "node.scrollIntoView({block: 'center'}); const b = node.getClientRects()[0]; "
            f"return [b.x + b.width * {x}, b.y + b.height * {y}] }})()"
        )
        kinds = ("mouseMoved", "mousePressed", "mouseReleased") if click else ("mouseMoved",)
        for kind in kinds:
            button = "none" if kind == "mouseMoved" else "left"
            self.call("Input.dispatchMouseEvent", type=kind, x=box[0], y=box[1], button=button, clickCount=1)

    def key(self, name: str) -> None:
        """Press a key."""
        for kind in ("keyDown", "keyUp"):
            self.call("Input.dispatchKeyEvent", type=kind, key=name, code=name)

    def scheme(self, name: str) -> None:
        """What the reader prefers: light or dark."""
        self.call("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": name}])

    def screenshot(self, file: Path, whole: bool = False) -> bytes:
        """A PNG of the window, or of the whole page."""
        taken = base64.b64decode(self.call("Page.captureScreenshot", captureBeyondViewport=whole)["data"])
        file.write_bytes(taken)
        return taken
