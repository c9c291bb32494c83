"""What differs between nodes is found, and the odd ones are named where there are such."""

from __future__ import annotations

from typing import Any

import pytest
from machines.tree import broken, tree

from hpc_mp.doctor.drift import TRAITS, drift, traits

SAME = {"/etc/os-release": 'PRETTY_NAME="Ubuntu 22.04.5 LTS"\n',
        "/proc/driver/nvidia/gpus/0001:00:00.0/information": "Model: \t\t NVIDIA H100\nVideo BIOS: \t 96.00.68.00.01\n"}
OTHER: dict[str, tuple[dict[str, Any], str]] = {  # trait: what is otherwise on one node, and what is said of it
    "kernel": ({"/proc/sys/kernel/osrelease": "5.15.0-1073-azure"}, "6.8.0-1021-generic on n0, n1, n2; 5.15.0-1073-azure on n3"),
    "system": ({"/etc/os-release": 'PRETTY_NAME="AlmaLinux 9.4"\n'}, "AlmaLinux 9.4 on n3"),
    "driver": ({"/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX Open Kernel Module for x86_64  570.86.15"},
    "570.86.15 on n3"),
    "gpus": ({"/sys/bus/pci/devices/0001:00:00.0": None}, "7 × nvidia 0x2330 on n3"),
    "vbios": ({"/proc/driver/nvidia/gpus/0001:00:00.0/information": "Video BIOS: \t 96.00.30.00.01\n"}, "96.00.30.00.01 on n3"),
    "cpus": ({"/sys/devices/system/cpu/online": "0-47"}, "48 × unknown on n3"),
    "memory": ({"/proc/meminfo": "MemTotal: 900000000 kB"}, "864 GiB on n3"),
    "ports": ({"/sys/class/infiniband/mlx5_ib7": None}, "7 × 400 Gb/s InfiniBand on n3"),
    "firmware": ({"/sys/class/infiniband/mlx5_ib{0..7}/fw_ver": "28.36.1010"}, "MT_0000000838 28.36.1010 on n3"),
    "partition": ({"/sys/class/infiniband/mlx5_ib{0..7}/ports/1/pkeys/0": "0x8011"}, "0x8011 on n3"),
    "packet": ({"ibv_devinfo": ("4096 (5)\n\nhca", "2048 (4)\n\nhca")}, "2048, 4096 on n3"),
    "mtu": ({"/sys/class/net/eth0/mtu": "9000"}, "9000 on n3"),
    "limits": ({"/proc/self/limits": ("Max locked memory         unlimited", "Max locked memory         65536    ")},
               "locked memory 65536, open files 1048576 on n3"),
}


def test_nodes_that_are_alike_do_not_drift() -> None:
    found = list(drift({f"n{at}": traits(broken("ndv5", SAME)) for at in range(3)}))
    assert {(finding.code, finding.severity) for finding in found} == {(f"drift-{each}", "ok") for each in TRAITS}


@pytest.mark.parametrize("trait", [*OTHER, "packages"])
def test_the_odd_node_is_named(trait: str) -> None:
    edits, says = OTHER.get(trait, ({}, "torch 2.7.0 on n3"))
    usual, odd = traits(broken("ndv5", SAME)), traits(broken("ndv5", SAME | edits))
    if trait == "packages":
        odd = odd | {"packages": "torch 2.7.0"}
    found = [each for each in drift({"n0": usual, "n1": usual, "n2": usual, "n3": odd}) if each.severity != "ok"]
    assert [(each.code, each.subject) for each in found] == [(f"drift-{trait}", "n3")], found
    assert says in found[0].message


def test_two_nodes_that_differ_are_both_shown_and_none_is_blamed() -> None:
    found = [finding for finding in drift({"a": {"kernel": "1"}, "b": {"kernel": "2"}})]
    assert [(each.subject, each.message) for each in found] == [("", "release of the kernel: 1 on a; 2 on b")]


def test_what_one_node_alone_shows_is_no_drift() -> None:
    assert list(drift({"a": {"kernel": "1"}, "b": {}})) == []
    assert "ports" not in traits(tree("ethernet"))
