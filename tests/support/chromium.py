"""A real browser without a screen: Debian's Chromium, driven through its DevTools protocol."""

import base64
import json
import os
import select
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from elastic_etcd.system import trampoline
from tests.support.debian import unpacked

_ANSWERS = 120.0
# Where --remote-debugging-pipe reads and writes.
_AS_3_AND_4 = """
import os, sys
os.dup2(int(sys.argv[1]), 3)
os.dup2(int(sys.argv[2]), 4)
os.execv(sys.argv[3], sys.argv[3:])
"""


class Page:
    """A tab, and all that its browser has said of it."""

    def __init__(self, to: int, answers: int) -> None:
        self.said: list[dict[str, Any]] = []
        self._to, self._answers, self._rest = to, answers, b""
        self._number, self._session = 0, ""

    def attach(self) -> None:
        """To a new tab, and hear of its network and its console."""
        target = self.call("Target.createTarget", url="about:blank")["targetId"]
        attached = self.call("Target.attachToTarget", targetId=target, flatten=True)
        self._session = attached["sessionId"]
        for domain in ("Page", "Runtime", "Log", "Network"):
            self.call(f"{domain}.enable")

    def call(self, method: str, **parameters: Any) -> Any:
        """What the browser answers; what it says meanwhile is kept in `said`."""
        self._number += 1
        message = {"id": self._number, "method": method, "params": parameters}
        if self._session:
            message["sessionId"] = self._session
        os.write(self._to, json.dumps(message).encode() + b"\0")
        while (answer := self._next()).get("id") != self._number:
            self.said.append(answer)
        assert "result" in answer, answer
        return answer["result"]

    def _next(self) -> dict[str, Any]:
        while b"\0" not in self._rest:
            ready, _, _ = select.select([self._answers], [], [], _ANSWERS)
            assert ready, "Chromium does not answer"
            more = os.read(self._answers, 1 << 20)
            assert more, "Chromium has ended"
            self._rest += more
        first, _, self._rest = self._rest.partition(b"\0")
        found: dict[str, Any] = json.loads(first)
        return found

    def open(self, url: str, width: int = 1280, height: int = 900, *, dark: bool = False) -> None:
        """Go there, on a screen of that size."""
        size = {"width": width, "height": height, "deviceScaleFactor": 1, "mobile": width < 500}
        self.call("Emulation.setDeviceMetricsOverride", **size)
        scheme = {"name": "prefers-color-scheme", "value": "dark" if dark else "light"}
        self.call("Emulation.setEmulatedMedia", features=[scheme])
        self.call("Page.navigate", url=url)

    def evaluate(self, expression: str) -> Any:
        """The value of a JavaScript expression in the page."""
        given = self.call("Runtime.evaluate", expression=expression, returnByValue=True)
        assert "exceptionDetails" not in given, given
        return given["result"].get("value")

    def shows(self, expression: str) -> None:
        """Wait until the expression is true in the page."""
        deadline = time.monotonic() + _ANSWERS
        while not self.evaluate(expression):
            text = self.evaluate("document.body && document.body.innerText")
            assert time.monotonic() < deadline, f"{expression}\n{text}\n{self.complaints()}"
            time.sleep(0.02)

    def complaints(self) -> list[dict[str, Any]]:
        """What stands in its console, and what no script has caught."""
        names = ("Runtime.consoleAPICalled", "Runtime.exceptionThrown", "Log.entryAdded")
        return [each for each in self.said if each.get("method") in names]

    def requests(self) -> list[str]:
        """The URLs that it has asked for."""
        sent = [each for each in self.said if each.get("method") == "Network.requestWillBeSent"]
        return [each["params"]["request"]["url"] for each in sent]

    def screenshot(self, file: Path) -> None:
        """All of the page as a PNG."""
        found = self.call("Page.captureScreenshot", captureBeyondViewport=True)
        file.write_bytes(base64.b64decode(found["data"]))


@contextmanager
def chromium(folder: Path) -> Iterator[Page]:
    """A browser while this is open, with a profile in this folder. Raises NotToBeHad."""
    package = "chromium-headless-shell"
    root = unpacked(package, "bookworm", "chromium-bookworm", missing=True)
    libraries = next((root / "usr/lib").glob("*-linux-gnu"), root)
    theirs, to = os.pipe()
    answers, from_them = os.pipe()
    command = [
        *(sys.executable, "-I", "-S", trampoline.__file__, str(os.getpid()), "--"),
        *(sys.executable, "-I", "-S", "-c", _AS_3_AND_4, str(theirs), str(from_them)),
        str(root / "usr/lib/chromium" / package),
        "--remote-debugging-pipe",
        "--no-sandbox",
        "--disable-gpu",
        "--no-proxy-server",
        f"--user-data-dir={folder}",
    ]
    env = os.environ | {"LD_LIBRARY_PATH": f"{libraries}:{libraries}/pulseaudio"}
    with (folder / "chromium.log").open("wb") as log:
        process = subprocess.Popen(
            command, env=env, stdout=log, stderr=log, pass_fds=(theirs, from_them)
        )
    os.close(theirs)
    os.close(from_them)
    try:
        page = Page(to, answers)
        page.attach()
        yield page
    finally:
        process.kill()
        process.wait()
        os.close(to)
        os.close(answers)
