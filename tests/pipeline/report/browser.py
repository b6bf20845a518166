"""A headless Chromium, driven over its debugging pipe: no driver and no library is needed for it."""

from __future__ import annotations

import base64
import json
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, BinaryIO

NAMES = ("chromium", "chromium-browser", "google-chrome")
SECONDS = 60
DRAWN = "new Promise(done => { dispatchEvent(new Event('beforeprint')); setTimeout(done); })"
"""Has all pictures of a report drawn, as they are for paper: those that nobody has scrolled to yet too."""
FAULTS = """window.faults = [];
addEventListener('securitypolicyviolation', event => faults.push(`${event.violatedDirective} ${event.blockedURI}`));
addEventListener('error', event => faults.push(event.message));
addEventListener('unhandledrejection', event => faults.push(`${event.reason}`));"""
"""Notes in a page what its policy refused, and what its scripts failed of."""
CONTRAST = """(() => {
  const WORDS = 'main > * p, h1, h2, td, th, li, code, a, dt, dd, label, input, .dt-button, .dtcc-button, .which';
  const light = text => {
    const parts = text.match(/[\\d.]+/g).slice(0, 3).map(part => part / 255);
    const [r, g, b] = parts.map(part => part <= 0.03928 ? part / 12.92 : ((part + 0.055) / 1.055) ** 2.4);
    return 0.2126 * r + 0.7152 * g + 0.0722 * b;
  };
  const page = light(getComputedStyle(document.body).backgroundColor);
  const ratio = colour => { const l = light(colour); return (Math.max(l, page) + 0.05) / (Math.min(l, page) + 0.05); };
  const words = [...document.querySelectorAll(WORDS)].map(part => getComputedStyle(part).color);
  const texts = [...document.querySelectorAll('figure svg text:not(.bartext)')];
  const drawn = texts.map(part => getComputedStyle(part).fill);
  return {page, worst: Math.min(...[...words, ...drawn].map(ratio))};
})()"""
"""Gives how light the page is, and the worst contrast to it of any of its words."""


def installed() -> str | None:
    """Return the path of a Chromium, None where there is none."""
    return next((path for name in NAMES if (path := shutil.which(name))), None)


class Browser:
    """One page of a browser."""

    def __init__(self, commands: BinaryIO, answers: BinaryIO) -> None:
        self._commands, self._answers = commands, answers
        self._sent = 0
        self._session: str | None = None
        target = self._ask("Target.createTarget", url="about:blank")["targetId"]
        self._session = self._ask("Target.attachToTarget", targetId=target, flatten=True)["sessionId"]
        self._ask("Page.enable")
        self._ask("Page.addScriptToEvaluateOnNewDocument", source=FAULTS)

    def open(self, page: Path, *, width: int, scheme: str) -> None:
        """Load ``page`` on a screen of ``width`` CSS pixels in the colour ``scheme``."""
        metrics = {"width": width, "height": 900, "deviceScaleFactor": 1, "mobile": width < 600}
        self._ask("Emulation.setDeviceMetricsOverride", **metrics)
        self.prefer(scheme)
        self._ask("Page.navigate", url=page.resolve().as_uri())
        self.evaluate(
            "new Promise(done => document.readyState == 'complete' ? done() : addEventListener('load', done))"
        )

    def prefer(self, scheme: str) -> None:
        """Tell the page that its reader prefers the colour ``scheme``."""
        self._ask("Emulation.setEmulatedMedia", features=[{"name": "prefers-color-scheme", "value": scheme}])

    def draw(self, page: Path, *, width: int, scheme: str) -> None:
        """Load the report ``page`` likewise, with all of its pictures drawn, wherever they are."""
        self.open(page, width=width, scheme=scheme)
        self.evaluate(DRAWN)

    def evaluate(self, script: str) -> Any:
        """Return what the JavaScript expression ``script`` gives in the page."""
        asked = {"expression": script, "returnByValue": True, "awaitPromise": True}
        answer = self._ask("Runtime.evaluate", **asked)
        assert "exceptionDetails" not in answer, answer
        return answer["result"].get("value")

    def press(self, key: str, text: str = "") -> None:
        """Press and let go of ``key``, as the keyboard names it; ``text`` is what it writes."""
        code = {"Enter": 13, "Tab": 9}.get(key, 0)
        for kind in ("keyDown", "keyUp"):
            more = {"text": text} if text and kind == "keyDown" else {}
            self._ask("Input.dispatchKeyEvent", type=kind, key=key, code=key, windowsVirtualKeyCode=code, **more)

    def point(self, x: float, y: float, *acts: str) -> None:
        """Bring the mouse to ``x`` and ``y`` of what is seen, and do ``acts`` there: ``Pressed`` or ``Released``."""
        for act in ("Moved", *acts):
            button = {"button": "left", "clickCount": 1, "buttons": int(act == "Pressed")} if act != "Moved" else {}
            self._ask("Input.dispatchMouseEvent", type=f"mouse{act}", x=x, y=y, **button)

    def print_page(self) -> bytes:
        """Return the page as it comes onto paper: a PDF."""
        return base64.b64decode(self._ask("Page.printToPDF", printBackground=True)["data"])

    def _ask(self, method: str, **parameters: Any) -> dict[str, Any]:
        self._sent += 1
        session = {"sessionId": self._session} if self._session else {}
        message = {"id": self._sent, "method": method, "params": parameters, **session}
        self._commands.write(json.dumps(message).encode() + b"\0")
        self._commands.flush()
        while (answer := json.loads(self._read())).get("id") != self._sent:
            pass
        assert "error" not in answer, (method, answer)
        result: dict[str, Any] = answer["result"]
        return result

    def _read(self) -> bytes:
        message = bytearray()
        while (byte := self._answers.read(1)) not in (b"\0", b""):
            message += byte
        assert message, "the browser is gone"
        return bytes(message)


@contextmanager
def browser(executable: str) -> Iterator[Browser]:
    """Start a browser with a profile of its own, and end it with the block."""
    to_read, commands = os.pipe()
    answers, to_write = os.pipe()
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as profile:
        options = ["--headless", "--no-sandbox", "--disable-gpu", "--disable-dev-shm-usage", "--hide-scrollbars"]
        shell = f'exec "$0" "$@" 3<&{to_read} 4>&{to_write}'
        command = [*options, "--remote-debugging-pipe", "--no-first-run", f"--user-data-dir={profile}", "about:blank"]
        process = subprocess.Popen(
            ["bash", "-c", shell, executable, *command], pass_fds=(to_read, to_write),
            stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL,
        )  # fmt: skip
        os.close(to_read)
        os.close(to_write)
        try:
            with os.fdopen(commands, "wb") as writing, os.fdopen(answers, "rb") as reading:
                yield Browser(writing, reading)
        finally:
            process.terminate()
            process.wait(SECONDS)
