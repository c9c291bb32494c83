"""What differs between nodes is found, and the odd ones are named where there are such."""

from __future__ import annotations

import pytest
from case import FaultTable
from machines.tree import broken, tree

from hpc_mp.doctor.drift import TRAITS, drift, traits

SAME = {"/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
        "/proc/driver/nvidia/gpus/0001:00:00.0/information": "Model: \t\t NVIDIA H100\nVideo BIOS: \t 96.00.68.00.01\n"}
TABLE = FaultTable.read("faults.toml")


def test_nodes_that_are_alike_do_not_drift() -> None:
    found = list(drift({f"n{at}": traits(broken("ndv5", SAME)) for at in range(3)}))
    assert {(finding.code, finding.severity) for finding in found} == {(f"drift-{each}", "ok") for each in TRAITS}


@pytest.mark.parametrize("trait", [*TABLE.drift, "packages"])
def test_the_odd_node_is_named(trait: str) -> None:
    row = TABLE.drift.get(trait, {"says": "torch 2.7.0 on n3"})
    usual, odd = traits(broken("ndv5", SAME)), traits(broken("ndv5", SAME | TABLE.edits("ndv5", row)))
    if trait == "packages":
        odd = odd | {"packages": "torch 2.7.0"}
    found = [each for each in drift({"n0": usual, "n1": usual, "n2": usual, "n3": odd}) if each.severity != "ok"]
    assert [(each.code, each.subject) for each in found] == [(f"drift-{trait}", "n3")], found
    assert row["says"] in found[0].message


def test_two_nodes_that_differ_are_both_shown_and_none_is_blamed() -> None:
    found = [finding for finding in drift({"a": {"kernel": "1"}, "b": {"kernel": "2"}})]
    assert [(each.subject, each.message) for each in found] == [("", "release of the kernel: 1 on a; 2 on b")]


def test_what_one_node_alone_shows_is_no_drift() -> None:
    assert list(drift({"a": {"kernel": "1"}, "b": {}})) == []
    assert "ports" not in traits(tree("ethernet"))
