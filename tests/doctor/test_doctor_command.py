"""The command ``hpc-mp doctor``, and the storage test."""

import json
import os
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machines.tree import HANGS, MACHINES, broken, tree

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.doctor import command
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor import node
from hpc_mp.doctor import storage as storage_test
from hpc_mp.doctor.node import diagnose, place_document
from hpc_mp.doctor.storage import Rates, judge, measure, storage


def called(*arguments: str) -> Result:
    return CliRunner().invoke(command, arguments, standalone_mode=True)


@pytest.fixture
def patient(monkeypatch: pytest.MonkeyPatch) -> None:
    """Nothing hangs: a busy machine has the time that it needs to look at a place."""
    monkeypatch.setattr(node, "_TRAITS_S", 60.0)


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


def test_this_machine_is_looked_at_without_failing_in_time(patient: None) -> None:
    begin = time.monotonic()
    done = called("--json")
    assert time.monotonic() - begin < 120
    seen = json.loads(done.stdout)
    assert done.exit_code == (seen["worst"] == "error") and not done.stderr
    assert len({finding["code"] for finding in seen["findings"]}) > 30 and seen["traits"]["memory"]


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


def test_traits_that_cannot_be_read_in_time_are_left_out() -> None:
    begin = time.monotonic()
    assert place_document(broken("ndv5", {"/etc/os-release": HANGS}))["traits"] == {}
    assert time.monotonic() - begin < 30
