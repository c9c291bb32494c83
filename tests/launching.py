"""What the tests of the emulator and of the launcher share."""

from __future__ import annotations

import os
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest

HERE = Path(__file__).parent
MARK = "HPC_MP_TEST_MARK"


@pytest.fixture
def mark() -> Iterator[str]:
    """A word in the environment of everything that a test starts; what is left at its end is an error, and killed."""
    word = uuid.uuid4().hex
    yield word
    left = marked(word)
    for process in left:
        process.kill()
    assert left == []


def marked(mark: str) -> list[psutil.Process]:
    """The living processes whose environment carries ``mark``."""
    found = []
    for process in psutil.process_iter():
        try:
            if process.environ().get(MARK) == mark and process.status() != psutil.STATUS_ZOMBIE:
                found.append(process)
        except (psutil.NoSuchProcess, psutil.AccessDenied):
            continue
    return found


def environment(mark: str, path: Path | None = None, **more: str) -> dict[str, str]:
    """Ours with ``mark`` and ``more``, for a process that imports what we can; from ``path`` before all others."""
    return {**os.environ, MARK: mark, "PYTHONPATH": os.pathsep.join(map(str, filter(None, [path, *sys.path]))), **more}


def until(condition: Callable[[], Any], seconds: float = 20.0) -> Any:
    """Wait for ``condition`` and return what it gives."""
    deadline = time.monotonic() + seconds
    while not (found := condition()):
        assert time.monotonic() < deadline, "it did not come to pass"
        time.sleep(0.02)
    return found
