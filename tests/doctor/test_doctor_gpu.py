"""The GPU checks on healthy machines; and that every check has a healthy and a broken case."""

from __future__ import annotations

import pytest
import test_doctor_gpu_links
import test_doctor_gpu_memory
import test_doctor_gpu_pcie
import test_doctor_gpu_presence
import test_doctor_gpu_use
from case import Case
from gpu_machines import CODES, GPU_KINDS, findings, holds, ills

from tests.machines.tree import tree

MODULES = (test_doctor_gpu_links, test_doctor_gpu_memory, test_doctor_gpu_pcie, test_doctor_gpu_presence, test_doctor_gpu_use)
# Only where the part exists: rows or pages, pending repairs (new drivers), limits of memory (A100), IMEX (racks), AMD
SOMEWHERE_ELSE = {"gpu-retired-pages", "gpu-amd", "gpu-nvlink-errors"}


@pytest.mark.parametrize("kind", GPU_KINDS)
def test_a_healthy_machine_is_well(kind: str) -> None:
    found = findings(tree(kind))
    assert ills(found) == {}
    assert len({finding.code for finding in found}) >= 35


@pytest.mark.parametrize("case", [case for module in MODULES for case in module.CASES], ids=str)
def test_what_is_broken_is_named_and_what_is_unusual_is_well(case: Case) -> None:
    holds(case)


def test_every_check_is_well_somewhere_and_ill_somewhere() -> None:
    well = {finding.code for kind in GPU_KINDS for finding in findings(tree(kind)) if finding.severity == "ok"}
    assert set(CODES) - well <= SOMEWHERE_ELSE  # those have healthy cases of their own in the files of their topic
    ill = {case.code for module in MODULES for case in module.CASES if case.outcome != "ok"}
    assert ill | {"gpu-nvlink-errors"} == set(CODES)
    assert len(CODES) == len(set(CODES)) >= 25


def test_no_gpu_no_words() -> None:
    assert findings(tree("ethernet")) == []
