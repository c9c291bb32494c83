"""The place of a test on the file system that all nodes of the lab see."""

import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_jobs import write_job
from slurm_lab.cluster import Cluster


@pytest.fixture
def here(lab: Cluster) -> Iterator[Path]:
    """Yield a directory with a blank in its path, to which anybody may write; the lab is mended after the test."""
    directory = lab.share / f"a place {os.urandom(3).hex()}"
    for path in (directory, directory / "state"):
        path.mkdir()
        path.chmod(0o777)
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.fixture
def job(here: Path) -> Path:
    return write_job(here)
