"""Which platform a machine is: recorded and rebuilt trees, small machines made here, and marks that are missing or misleading."""

import tomllib
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from bare import machine
from machines.tree import KINDS, broken, tree

from hpc_mp.environment.detect import Shown, platform, read_machine
from hpc_mp.environment.profiles import load_profiles

WANTED = {"ndv4": "azure-ndv4", "ndv5": "azure-ndv5", "ndh200v5": "azure-ndh200v5", "gb200": "azure-gb200", "p4d": "aws-efa",
          "p5": "aws-efa", "ethernet": "ethernet"}


@pytest.mark.parametrize("kind", sorted(WANTED))
def test_trees_of_real_machine_kinds(kind: str) -> None:
    found = platform(read_machine(tree(kind)))
    assert found.name == WANTED[kind] and found.evidence


@pytest.mark.parametrize("kind", KINDS)
def test_a_host_name_says_nothing(kind: str) -> None:
    named = broken(kind, {"/etc/hostname": "ip-10-0-0-1.p5.48xlarge.a3-megagpu.ndv5", "/proc/sys/kernel/hostname": "p5en-gb200"})
    assert platform(read_machine(named)).name == platform(read_machine(tree(kind))).name


def test_the_evidence_names_what_was_seen() -> None:
    said = " | ".join(platform(read_machine(tree("ndh200v5"))).evidence)
    for words in ("Microsoft Corporation", "8 × nvidia 0x2335", "RDMA over InfiniBand: mlx5_ib0", "RDMA over Ethernet: mlx5_an0"):
        assert words in said, said
    assert "EFA: 32" in " ".join(platform(read_machine(tree("p5"))).evidence)


# --- marks, one by one ------------------------------------------------------------------------------------------------

BARE = Shown("", "", (), {}, (), (), (), ("lo",), None)
ROWS = tomllib.loads(Path(__file__).with_name("platforms.toml").read_text(encoding="utf-8"))["rows"]


@pytest.mark.parametrize("row", ROWS, ids=str)
def test_platforms(row: dict[str, Any]) -> None:
    ports = {f"mlx5_{at}": ("InfiniBand",) for at in range(row.get("infiniband", 0))}
    ports |= {f"mlx5_e{at}": ("Ethernet",) for at in range(row.get("roce", 0))}
    ports |= {name: ("Unknown",) for name in row.get("efa", ())}
    shown = replace(BARE, vendor=row.get("vendor", ""), product=row.get("product", ""), layers=ports,
                    gpus=tuple(name for name, number in row.get("gpus", {}).items() for _ in range(number)),
                    drivers=("gve",) * row.get("gvnics", 0), efa=tuple(row.get("efa", ())), cxi=tuple(row.get("cxi", ())))
    assert platform(shown).name == row["is"]


def test_without_profiles_there_is_no_platform() -> None:
    assert platform(BARE, []).name is None
    assert platform(BARE, [profile for profile in load_profiles() if profile.detect is None]).name is None


def test_a_machine_made_of_files_alone(tmp_path: Path) -> None:
    """a3-megagpu-8g as Google's documentation shows it: nothing but sysfs is read."""
    files = {f"sys/bus/pci/devices/0000:0{at}:00.0/{name}": f"{text}\n" for at in range(8)
             for name, text in (("vendor", "0x10de"), ("device", "0x2330"), ("class", "0x030200"))}
    for at in range(9):
        base = tmp_path / f"sys/class/net/enp{at}s0"
        (base / "device").mkdir(parents=True)
        (base / "device/driver").symlink_to("../../../bus/pci/drivers/gve")
    found = read_machine(machine(tmp_path, {"sys/class/dmi/id/sys_vendor": "Google\n", **files}))
    assert platform(found).name == "gcp-a3-mega"
    assert found.route is None and len(found.interfaces) == 9


def test_a_machine_that_shows_nothing_is_no_error(tmp_path: Path) -> None:
    found = read_machine(machine(tmp_path))
    assert found == replace(BARE, interfaces=())
    assert platform(found).evidence[0] == "firmware: not shown"


@pytest.mark.parametrize("kind", ["ndv5", "p5"])
def test_a_container_that_hides_the_firmware_leaves_the_fabric(kind: str) -> None:
    hidden = broken(kind, {"/sys/class/dmi/id/sys_vendor": None, "/sys/class/dmi/id/product_name": None})
    assert platform(read_machine(hidden)).name == {"ndv5": "infiniband", "p5": "aws-efa"}[kind]
