"""The host's view and the view from inside of a container, the storage test, and the command."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from machines.tree import HANGS, MACHINES, broken, tree

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.doctor import command
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor import node
from hpc_mp.doctor import storage as storage_test
from hpc_mp.doctor.container_diff import ITEMS, differences, view
from hpc_mp.doctor.node import against, diagnose, place_document
from hpc_mp.doctor.storage import Rates, judge, measure, storage

HOST: dict[str, Any] = {
    "/etc/nccl.conf": "# from the image\nNCCL_IB_PCI_RELAXED_ORDERING=1\nNCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml\n",
    "/opt/microsoft/ndv5/topo.xml": "<system/>", "/dev/gdrdrv": "", "/dev/nvidia-caps-imex-channels/channel0": "",
    "/opt/amazon/efa/lib/libfabric.so.1": "", "/usr/local/gib/lib64/libnccl-net.so": "",
    "stat -f -c %S %b %a %c %d /dev/shm": "4096 115000000 114990000 115000000 114999000\n",
}
LOST: dict[str, tuple[dict[str, Any], str]] = {  # code: what the container does to it, and what is said
    "container-nccl-conf": ({"/etc/nccl.conf": None}, "2 of 2 are missing: NCCL_IB_PCI_RELAXED_ORDERING=1"),
    "container-topology": ({"/opt/microsoft": None}, "1 of 1 are missing: /opt/microsoft/ndv5/topo.xml"),
    "container-uverbs": ({"/dev/infiniband/uverbs{3,4}": None}, "2 of 8 are missing: /dev/infiniband/uverbs3"),
    "container-rdma": ({"/sys/class/infiniband": None}, "8 of 8 are missing"),
    "container-gpus": ({"/dev/nvidia{1..7}": None}, "7 of 8 are missing: /dev/nvidia1"),
    "container-channels": ({"/dev/nvidia-caps-imex-channels": None}, "1 of 1 are missing"),
    "container-gdrdrv": ({"/dev/gdrdrv": None}, "1 of 1 are missing: /dev/gdrdrv"),
    "container-efa": ({"/opt/amazon": None}, "1 of 1 are missing"),
    "container-plugins": ({"/usr/local/gib": None}, "1 of 1 are missing"),
    "container-interfaces": ({"/sys/class/net/eth0": None}, "1 of 9 are missing: eth0"),
    "container-memlock": ({"/proc/self/limits": ("Max locked memory         unlimited", "Max locked memory         65536    ")},
                          "64 KiB inside, unlimited on the host"),
    "container-nofile": ({"/proc/self/limits": ("Max open files            1048576", "Max open files            1024   ")},
                         "1024 inside, 1048576 on the host"),
    "container-shm": ({"stat -f -c %S %b %a %c %d /dev/shm": "4096 16384 16384 100 90\n"}, "64 MiB inside, 439 GiB on the host"),
    "container-memory": ({"/proc/meminfo": "MemTotal: 1048576 kB\nMemAvailable: 9 kB"}, "1 GiB inside"),
}


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, standalone_mode=True)


# --- host and container -----------------------------------------------------------------------------------------------


def test_a_container_that_shows_what_its_host_shows_lacks_nothing() -> None:
    host = view(broken("ndv5", HOST))
    assert {item.code for item in ITEMS} == set(LOST) == {finding.code for finding in differences(host, host)}
    assert all(finding.severity == "ok" for finding in differences(host, host))


@pytest.mark.parametrize("code", LOST)
def test_what_a_container_lacks_is_named(code: str) -> None:
    edits, says = LOST[code]
    kept = {name: edit for name, edit in (HOST | edits).items() if edit is not None or name not in HOST}
    host, inside = view(broken("ndv5", HOST)), view(broken("ndv5", kept))
    found = {finding.code: finding for finding in differences(host, inside)}
    assert found[code].severity in ("error", "warning") and says in found[code].message and found[code].fix
    follow = {"container-nccl-conf": {"container-topology"}, "container-rdma": set()}.get(code, set())
    assert {finding.code for finding in found.values() if finding.severity != "ok"} <= {code} | follow


def test_what_the_host_lacks_too_is_no_difference() -> None:
    codes = {finding.code for finding in differences(view(tree("ethernet")), view(tree("ethernet")))}
    assert "container-uverbs" not in codes and "container-memory" in codes


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs: a busy machine has the time that it needs to look at a place."""
    monkeypatch.setattr(node, "_VIEW_S", 60.0)


def test_documents_of_host_and_container_are_compared(tmp_path: Path, patient: None) -> None:
    host, inside = broken("ndv5", HOST), broken("ndv5", HOST | {"/dev/infiniband": None})
    (tmp_path / "host.json").write_text(json.dumps(place_document(host)))
    found = against(tmp_path / "host.json", inside)
    assert [finding.code for finding in found if finding.severity != "ok"] == ["container-uverbs"]
    (tmp_path / "host.json").write_text("{}")
    with pytest.raises(HpcMpError, match="no document of a host"):
        against(tmp_path / "host.json", inside)


# --- storage ----------------------------------------------------------------------------------------------------------


def test_storage_is_measured_in_bounds_and_nothing_is_left(tmp_path: Path) -> None:
    begin = time.monotonic()
    found = measure(str(tmp_path), size_limit=8 << 20, seconds=0.2)
    assert time.monotonic() - begin < 60
    assert found.same and found.size <= (8 << 20) + (4 << 20) and min(found.write, found.read, found.files) > 0
    assert list(tmp_path.iterdir()) == []


def test_what_is_read_must_be_what_was_written(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    real = os.pread
    monkeypatch.setattr(storage_test.os, "pread", lambda file, size, at: real(file, size - 1, at) + b"?" if at else real(file,
    size, at))
    found = measure(str(tmp_path), size_limit=12 << 20, seconds=5.0)
    assert not found.same
    assert judge("/x", "", found).severity == "error"


SOUND = Rates(2.0, 3.0, 5000.0, True, 1 << 28)


@pytest.mark.parametrize(("rates", "outcome"), [
    (SOUND, "ok"), (Rates(0.05, 3.0, 5000.0, True, 1), "warning"), (Rates(2.0, 0.01, 5000.0, True, 1), "warning"),
    (Rates(2.0, 3.0, 20.0, True, 1), "warning"), (Rates(2.0, 3.0, 5000.0, False, 1), "error"), (Unavailable("no"), "unknown")])
@pytest.mark.parametrize(("type_", "code"), [("nfs4", "storage-shared"), ("lustre", "storage-shared"), ("xfs", "storage-local")])
def test_rates_are_judged(rates: Rates | Unavailable, outcome: str, type_: str, code: str) -> None:
    found = judge("/x", type_, rates)
    assert (found.code, found.severity) == (code, outcome)


def test_a_directory_that_is_not_there_is_incomplete(tmp_path: Path) -> None:
    found = storage([str(tmp_path / "gone")], NodeSource())
    assert [(each.severity, "No such file" in each.message) for each in found] == [("unknown", True)]


# --- the command ------------------------------------------------------------------------------------------------------


def test_this_machine_is_looked_at_without_failing_in_time(patient: None) -> None:
    begin = time.monotonic()
    done = called("--json")
    assert time.monotonic() - begin < 120
    seen = json.loads(done.stdout)
    assert done.exit_code == (seen["worst"] == "error") and not done.stderr
    assert len({finding["code"] for finding in seen["findings"]}) > 30 and "container-memory" in seen["view"]


def test_a_machine_that_is_not_here(tmp_path: Path) -> None:
    source = broken("ndv5", {"/sys/class/infiniband/mlx5_ib3/ports/1/state": "1: DOWN"})
    (tmp_path / "commands.json").write_text((MACHINES / "linux" / "commands.json").read_text())
    options = ("--root", str(source.root), "--commands", str(tmp_path / "commands.json"))
    done = called(*options, "--check", "fabric-port", "--check", "dns-own-name")
    assert done.exit_code == 1
    assert "mlx5_ib3 port 1" in done.stdout and "look at it (sminfo" in done.stdout and "node17: 1 error, 8 ok" in done.stdout
    done = called(*options, "--check", "dns-own-name", "--all", "--json")
    assert done.exit_code == 0 and json.loads(done.stdout)["host"] == "node17"
    assert "ok " in called(*options, "--check", "dns-own-name", "--all").stdout


def test_a_check_that_does_not_exist_is_answered_with_the_nearest() -> None:
    with pytest.raises(HpcMpError, match="Did you mean 'fabric-port'"):
        diagnose(tree("ndv5"), ["fabric-prot"])


@pytest.mark.parametrize("text", ["", "[]", "{", "\udcff"])
def test_a_file_of_answers_that_is_none_is_refused(tmp_path: Path, text: str) -> None:
    (tmp_path / "c.json").write_bytes(text.encode("utf-8", "surrogateescape"))
    done = CliRunner().invoke(command, ["--commands", str(tmp_path / "c.json")], standalone_mode=False)
    assert isinstance(done.exception, HpcMpError)


def test_a_view_that_hangs_is_empty_and_in_time() -> None:
    begin = time.monotonic()
    assert place_document(broken("ndv5", {"/etc/nccl.conf": HANGS}))["view"] == {}
    assert time.monotonic() - begin < 30
