"""The health check as Slurm runs it: one file, the node's own Python, the standard library, and what it says and does."""

import ast
import json
import os
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from tables import table

import hpc_mp
from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.cluster.slurm.records import drain
from hpc_mp.doctor.health import lines, main, reason
from hpc_mp.doctor.install import ARCHIVE, SCRIPT, install, pack, packed

SYSTEM = next((path for path in map(Path, ("/usr/bin/python3", sys.executable)) if path.exists()), Path(sys.executable))
ERRORS = [Finding("fabric-port", "error", "mlx5_ib3 port 1", "down", "look at the cable"),
          Finding("shm-size", "error", "/dev/shm", "tiny")]


def absent(argv: Sequence[str]) -> str:
    raise CommandFailed(f"{argv[0]} is not on PATH")


def ran(python: str, archive: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([python, "-IS", str(archive), *options], cwd="/", env={}, text=True, capture_output=True, timeout=60)


@pytest.fixture(scope="module")
def archive(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("health") / ARCHIVE
    pack(file)
    return file


# --- the file ---------------------------------------------------------------------------------------------------------


def test_it_runs_with_the_nodes_own_python_anywhere_within_its_deadline(archive: Path) -> None:
    """Without site-packages (``-IS``), so of the standard library and itself alone."""
    begin = time.monotonic()
    done = ran(str(SYSTEM), archive, "--json")
    assert time.monotonic() - begin < 60, "5 s on a machine that is not loaded"
    assert done.returncode in (0, 1) and not done.stderr, done.stderr
    codes = {finding["code"] for finding in json.loads(done.stdout)["findings"]}
    assert {"memory-free", "limit-memlock", "mount-hung"} <= codes


def test_it_runs_with_the_oldest_python_that_it_names(archive: Path) -> None:
    named = subprocess.run(["python3.10", "-c", "import sys; print(sys.executable)"], text=True, capture_output=True) \
        if shutil.which("python3.10") else None
    if named is None or named.returncode:
        pytest.skip("no python3.10 is here")
    done = ran(named.stdout.strip(), archive, "--check", "limit-stack", "--json")
    assert [finding["code"] for finding in json.loads(done.stdout)["findings"]] == ["limit-stack"], done.stderr


def test_its_sources_are_python_3_10_and_import_the_standard_library_alone_wherever_they_import() -> None:
    """Inside of functions too. What reads the catalogue's files is not packed: a node has its rows as JSON."""
    for file in packed():
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"), feature_version=(3, 10))):
            names = [alias.name for alias in node.names] if isinstance(node, ast.Import) else []
            names += [node.module or ""] if isinstance(node, ast.ImportFrom) else []
            roots = {name.split(".")[0] for name in names} - {"hpc_mp"}
            assert roots <= sys.stdlib_module_names - {"tomllib"}, (file, roots)


def test_what_the_check_imports_is_packed_and_the_same_sources_give_the_same_bytes(archive: Path, tmp_path: Path) -> None:
    names = {str(file.relative_to(Path(hpc_mp.__file__).parent)) for file in packed()}
    assert {"__init__.py", "base/command.py", "cluster/slurm/records.py", "doctor/checks/registry.py", "doctor/health.py",
            } <= names
    assert not [name for name in names if name.startswith(("train", "launch", "cli", "job"))] and len(names) < 100
    pack(tmp_path / "again.pyz")
    assert (tmp_path / "again.pyz").read_bytes() == archive.read_bytes()


# --- what it says -----------------------------------------------------------------------------------------------------


def test_lines_for_people_and_reasons_for_slurm() -> None:
    found = [Finding("a", "ok", "", "well"), Finding("b", "unknown", "/x", "hung"), *ERRORS]
    assert lines(found) == ["error hpc-mp:fabric-port:mlx5_ib3 port 1: down -> look at the cable",
                            "error hpc-mp:shm-size:/dev/shm: tiny", "unknown hpc-mp:b:/x: hung"]
    assert reason(ERRORS) == "hpc-mp:fabric-port:mlx5_ib3 port 1; hpc-mp:shm-size:/dev/shm"
    many = reason([Finding("fabric-port", "error", f"mlx5_{at} port 1", "") for at in range(40)])
    assert len(many) <= 210 and many.endswith(" +35") and many.count("hpc-mp:") == 5
    assert reason([Finding("x", "error", "it's \"$HOME\"; `rm`\n", "")]) == "hpc-mp:x:it s HOME rm"


@pytest.mark.parametrize(("state", "does"), [("IDLE", True), ("MIXED+CLOUD", True), ("IDLE+DRAIN", False), ("ALLOCATED+DRAIN",
False)])
def test_a_node_is_drained_once_and_by_its_own_name(state: str, does: bool) -> None:
    asked: list[tuple[str, ...]] = []

    def slurm(argv: Sequence[str]) -> str:
        asked.append(tuple(argv))
        return f"NodeName=n7 Arch=x86_64 State={state} Reason=disk [root]\n"
    said = drain("n7", reason(ERRORS[:1]), slurm)
    update = ("scontrol", "update", "NodeName=n7", "State=DRAIN", "Reason=hpc-mp:fabric-port:mlx5_ib3 port 1")
    assert asked == [("scontrol", "show", "node", "--oneliner", "n7"), *([update] if does else [])]
    assert said == ("n7 is drained: hpc-mp:fabric-port:mlx5_ib3 port 1" if does else "n7 is already drained")


def test_without_slurm_nothing_is_drained_and_it_says_so() -> None:
    assert "scontrol is not on PATH" in drain("n7", "x", absent)


# --- the program that was there before --------------------------------------------------------------------------------


def program(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


@pytest.mark.parametrize("code", [0, 7])
def test_the_program_that_was_there_runs_and_its_exit_code_counts(tmp_path: Path, code: int) -> None:
    before = program(tmp_path / "healthagent", f"echo before > {tmp_path}/ran; exit {code}")
    assert main(["--check", "clocksource", "--chain", str(before)]) == code
    assert (tmp_path / "ran").read_text() == "before\n"


def test_install_chains_what_slurm_has_and_keeps_it_when_installed_again(tmp_path: Path) -> None:
    before = program(tmp_path / "health agent", f"touch {tmp_path}/ran")
    asked = f"ClusterName = x\nHealthCheckProgram      = {before}\nHealthCheckNodeState = ANY\n"
    assert install(tmp_path / "one", None, False, lambda argv: asked).chained == str(before)
    done = install(tmp_path / "two", str(before), False, absent)
    assert done.chained == str(before)
    again = install(tmp_path / "two", None, False, lambda argv: f"HealthCheckProgram = {done.script}\n")
    assert again.chained == str(before)
    assert subprocess.run([again.script, "--check", "clocksource"], env={}, timeout=60).returncode == 0
    assert (tmp_path / "ran").exists()


def test_install_without_anything_before(tmp_path: Path) -> None:
    for config in ("HealthCheckProgram = (null)\n", f"HealthCheckProgram = /elsewhere/{SCRIPT}\n", ""):
        assert install(tmp_path, None, True, lambda argv, config=config: config).chained is None  # type: ignore[misc]
    assert "--drain" in (tmp_path / SCRIPT).read_text() and "--chain" not in (tmp_path / SCRIPT).read_text()
    assert os.access(tmp_path / SCRIPT, os.X_OK)


@pytest.mark.parametrize(("mounts", "directory"), table(__file__, "doctor_health.toml", "shared_storage"))
def test_shared_storage_is_refused(tmp_path: Path, mounts: str, directory: str) -> None:
    place, root = tmp_path / "place", tmp_path / "root"
    (place / "far").mkdir(parents=True)
    (place / "near").symlink_to("far")
    (root / "proc").mkdir(parents=True)
    (root / "proc/mounts").write_text("/dev/sda1 / ext4 rw 0 0\n" + mounts.replace("{}", str(place)) + " 0 0\n")
    with pytest.raises(HpcMpError, match="is on nfs4"):
        install(place / directory, None, False, absent, NodeSource(root))
    assert not (place / directory).exists()


def test_a_local_mount_over_a_shared_one_is_not_refused(tmp_path: Path) -> None:
    place, root = tmp_path / "place", tmp_path / "root"
    (root / "proc").mkdir(parents=True)
    (root / "proc/mounts").write_text(f"server:/x {place} nfs4 rw 0 0\n/dev/sdb1 {place} ext4 rw 0 0\n")
    assert install(place / "bin", None, False, absent, NodeSource(root)).script.exists()


def test_a_directory_that_cannot_be_written_is_named(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(HpcMpError, match="cannot be written"):
        install(tmp_path / "file" / "x", None, False, absent)


def test_files_that_are_as_they_should_be_are_not_written_anew(tmp_path: Path) -> None:
    def seen() -> dict[str, tuple[int, int]]:
        return {file.name: (file.stat().st_ino, file.stat().st_mtime_ns) for file in tmp_path.iterdir()}

    install(tmp_path, None, False, absent)
    first = seen()
    install(tmp_path, None, False, absent)
    assert seen() == first and len(first) == 2
    install(tmp_path, None, True, absent)  # another script, the same archive
    assert {name for name, was in first.items() if seen()[name] != was} == {SCRIPT}
    (tmp_path / SCRIPT).chmod(0o644)
    (tmp_path / ARCHIVE).write_bytes(b"cut off")
    install(tmp_path, None, True, absent)
    assert (tmp_path / SCRIPT).stat().st_mode & 0o777 == 0o755 and (tmp_path / ARCHIVE).stat().st_size > 100_000
