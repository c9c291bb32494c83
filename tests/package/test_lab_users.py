"""Tests that use the lab's Slurm are known by their fixtures, so that they alone go to the workers that have one."""

from __future__ import annotations

from pathlib import Path

from lab_users import lab_users, uses_the_lab

FILE = """
import pytest
from slurm_lab.lab import Lab

@pytest.fixture(scope="module")
def cluster(lab: Lab): ...

@pytest.fixture
def run(cluster): ...

def test_direct(lab): ...
def test_through_two(tmp_path, run): ...
@pytest.mark.parametrize("lab_name", ["lab"])
def test_other(lab_name): ...
@pytest.mark.usefixtures("cluster")
def test_marked(): ...
def helper(lab): ...
"""
OWN = """
import pytest
@pytest.fixture
def lab(): ...
@pytest.fixture
def cluster(lab): ...
def test_of_its_own(lab, cluster): ...
"""


def test_users_are_those_that_ask_for_the_fixture(tmp_path: Path) -> None:
    file, own = tmp_path / "test_one.py", tmp_path / "test_own.py"
    file.write_text(FILE)
    own.write_text(OWN)
    assert lab_users(file) == {"test_direct", "test_through_two", "test_marked"}
    assert lab_users(own) == set()
    assert uses_the_lab(tmp_path, "test_one.py::test_through_two[a::b-[c]]")
    assert not uses_the_lab(tmp_path, "test_one.py::test_other[lab]")
