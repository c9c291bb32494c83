"""Pages opened in a real headless browser: the elements drawn, their sizes, and the browser's complaints."""

import json
import re
import shutil
import subprocess
import tempfile
from dataclasses import dataclass
from html import unescape
from pathlib import Path

import pytest
from tables import table

PROGRAM = shutil.which("chromium") or shutil.which("chromium-browser") or shutil.which("google-chrome")
needs_browser = pytest.mark.skipif(PROGRAM is None, reason="no browser: apt-get install chromium")
FLAGS = ("--headless", "--no-sandbox", "--disable-gpu", "--disable-quic", "--no-first-run", "--disable-background-networking",
         "--disable-component-update", "--disable-sync", "--enable-logging=stderr", "--hide-scrollbars",
         "--allow-file-access-from-files", "--disable-web-security", "--virtual-time-budget=3000", "--dump-dom")
# The page is inspected from a frame around it, so that it is not changed: its scripts run under its own policy.
FRAME = table(__file__, "browser.toml", "frame")


@dataclass(frozen=True)
class Opened:
    """A page as a browser shows it. ``figures``: (class or tag, width, height) in pixels; ``complaints``: console messages."""

    figures: tuple[tuple[str, float, float], ...]
    width: int
    needed: int
    text: str
    complaints: tuple[str, ...]

    @property
    def overflows(self) -> bool:
        """True if the page is wider than its window. A wide figure may be in a separate scrolling box."""
        return self.needed > self.width


def opened(page: Path, width: int = 1280) -> Opened:
    assert PROGRAM is not None
    with tempfile.TemporaryDirectory(ignore_cleanup_errors=True) as folder:
        frame = Path(folder, "frame.html")
        frame.write_text(FRAME.format(width=width, page=page.resolve().as_uri()), encoding="utf-8")
        command = [PROGRAM, *FLAGS, f"--user-data-dir={folder}/profile", f"--window-size={width},900", frame.as_uri()]
        done = subprocess.run(command, capture_output=True, text=True, timeout=120)
    measured = re.search(r'<pre id="measured">(.+?)</pre>', done.stdout, re.DOTALL)
    assert measured, f"the page did not load: {done.stderr[-2000:]}"
    found = json.loads(unescape(measured[1]))
    complaints = tuple(line for line in done.stderr.splitlines() if "CONSOLE" in line)
    return Opened(tuple(map(tuple, found["figures"])), found["width"], found["needed"], found["text"], complaints)
