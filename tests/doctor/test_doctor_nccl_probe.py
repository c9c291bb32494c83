"""What network NCCL takes here: asked of NCCL itself, or read from logs that were kept."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
from click.testing import CliRunner, Result
from machines.tree import HANGS, broken, tree

from hpc_mp.cli.doctor import command
from hpc_mp.cluster.node.source import OwnProgram, Unavailable, here
from hpc_mp.doctor.nccl_log.judge import PROGRAMS, taken

LOGS = Path(__file__).parents[1] / "nccl_logs"
PROBE = "nccl-probe"


def log(name: str) -> str:
    return (LOGS / f"{name}.log").read_text(encoding="utf-8")


def test_a_probe_that_hangs_is_not_waited_for() -> None:
    begin = time.monotonic()
    assert taken(broken("ndv5", {PROBE: HANGS}), patience=0.5) == () and time.monotonic() - begin < 30


def test_nccl_is_not_started_where_it_has_no_choice() -> None:
    """The probe would tell of sockets, but nobody asks it; the whole machine has an error (see above)."""
    healthy = tree("ndv5")
    gpus = [path for path in healthy.names("/sys/bus/pci/devices/*") if healthy.text(f"{path}/vendor") == "0x10de"]
    for lost in (["/dev/nvidiactl", "/proc/driver/nvidia", *gpus], ["/sys/class/infiniband"]):
        assert taken(broken("ndv5", {PROBE: log("one-rank-socket"), **dict.fromkeys(lost)})) == (), lost


def test_the_probe_is_silent_and_quick_without_a_gpu() -> None:
    environ = {**os.environ, "CUDA_VISIBLE_DEVICES": ""}
    begin = time.monotonic()
    done = subprocess.run(PROGRAMS[PROBE].argv, env=environ, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr
    assert time.monotonic() - begin < PROGRAMS[PROBE].timeout / 2
    assert here(environ, own=PROGRAMS).answer([PROBE]) == ""


def test_the_probe_is_silent_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('none here')\n")
    argv = [sys.executable, *PROGRAMS[PROBE].argv[2:]]  # without -P, so that PYTHONPATH goes before
    done = subprocess.run(argv, env={**os.environ, "PYTHONPATH": str(tmp_path)}, capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stdout) == (0, ""), done.stderr


def test_a_program_of_ours_goes_by_its_name_and_has_its_own_time() -> None:
    source = here(own={"greet": OwnProgram(("sh", "-c", "echo hello $1", "sh"), 60.0), "sleep": OwnProgram(("sleep",), 0.2)})
    assert source.answer(["greet", "you"]) == "hello you\n"
    with pytest.raises(Unavailable, match=r"within 0\.2 s"):
        source.answer(["sleep", "3"])
    with pytest.raises(Unavailable, match="greet is not on PATH"):
        here().answer(["greet"])


def doctor(tmp_path: Path, *logs: Path) -> Result:
    commands = tmp_path / "commands.json"
    commands.write_text("{}")
    words = [word for each in logs for word in ("--nccl-log", str(each))]
    return CliRunner().invoke(command, ["--root", str(tree("ndv5").root), "--commands", str(commands), "--json", *words])


def test_a_kept_log_is_judged(tmp_path: Path) -> None:
    done = doctor(tmp_path, LOGS / "ib-socket.log")
    found = json.loads(done.stdout)
    assert done.exit_code == 1 and found["worst"] == "error"
    assert {each["code"] for each in found["findings"] if each["severity"] == "error"} == {"nccl-network"}
    assert {each["code"].partition("-")[0] for each in found["findings"]} == {"nccl"}, "the machine itself is not looked at"
    assert doctor(tmp_path, LOGS / "ib-healthy.log").exit_code == 0


def test_several_logs_are_those_of_one_job(tmp_path: Path) -> None:
    """One file per rank, as NCCL_DEBUG_FILE writes them; in a directory beside what is none."""
    (tmp_path / "n1").mkdir()
    for rank in range(16):
        rows = [row for row in log("ib-one-node-socket").splitlines(keepends=True) if row.startswith(f"{rank}: ")]
        (tmp_path / "n1" / f"nccl.{rank}.log").write_text("".join(rows))
    (tmp_path / "n1" / "dump").write_bytes(bytes(range(256)) * 100)
    whole, files = (doctor(tmp_path, path) for path in (LOGS / "ib-one-node-socket.log", tmp_path / "n1"))
    assert files.exit_code == 1 and json.loads(files.stdout)["findings"] == json.loads(whole.stdout)["findings"]
    named = doctor(tmp_path, *(tmp_path / "n1" / f"nccl.{rank}.log" for rank in range(8)))
    assert named.exit_code == 0, "only one node has sockets"


def test_a_log_that_cannot_be_read_and_one_of_something_else(tmp_path: Path) -> None:
    done = CliRunner().invoke(command, ["--nccl-log", str(tmp_path / "none.log")], standalone_mode=False)
    assert "none.log: cannot be read (No such file or directory)" in str(done.exception).replace("\n", " ")
    (tmp_path / "x.log").write_text("epoch 1\n")
    done = doctor(tmp_path, tmp_path / "x.log")
    assert done.exit_code == 0 and [each["severity"] for each in json.loads(done.stdout)["findings"]] == ["unknown"]
