"""What tests of the engine on a GPU share. They run with `make gpu`."""

import sys
from pathlib import Path

import pytest

sys.path.insert(0, str(Path(__file__).parents[1] / "train"))

from layouts import write_text


@pytest.fixture(scope="session")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with the text of the jobs."""
    directory = tmp_path_factory.mktemp("gpu")
    write_text(directory)
    return directory
