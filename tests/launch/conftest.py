"""Fixtures that several tests of the launcher share."""

from pathlib import Path

import pytest
from launching import mark, write_job

__all__ = ["mark"]  # a fixture


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)
