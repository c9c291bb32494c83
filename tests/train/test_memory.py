"""A rank's note of how much memory it holds."""

from __future__ import annotations

import time
from pathlib import Path

import psutil

from hpc_mp.train.engine.memory import resident_noted


def noted(file: Path) -> int:
    return int(file.read_text())


def settled(file: Path, expected: float) -> bool:
    """Whether the note comes to within a tenth of ``expected`` bytes in a minute; every reading on the way is a number."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and abs(noted(file) - expected) < expected / 10:
            return True
        time.sleep(0.05)
    return False


def test_the_note_follows_what_the_process_holds(tmp_path: Path) -> None:
    file = tmp_path / "memory-00000"
    own = psutil.Process().memory_info
    with resident_noted(file):
        assert settled(file, own().rss)
        before = own().rss
        held = bytearray(b"1" * before)
        assert own().rss > 1.5 * before and settled(file, own().rss)
        del held
        assert settled(file, before)
    last = file.stat().st_mtime_ns
    held = bytearray(b"1" * before)
    time.sleep(0.7)
    assert file.stat().st_mtime_ns == last and len(held) == before


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    with resident_noted(tmp_path / "absent" / "memory-00000"):
        time.sleep(0.1)
