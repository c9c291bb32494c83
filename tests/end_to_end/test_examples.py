"""The examples: each runs as it is, and one that resumes ends with the parameters of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from slurm_jobs import until
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.outcome import verdict

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `python` is the one of the tests
LAUNCH = [sys.executable, "-m", "hpc_mp", "launch", "job.toml"]


def copy(name: str, directory: Path, slow: bool = False) -> Path:
    """An example in a directory with a blank in its path; slowed down, so that it can be disturbed."""
    made = directory / f"{name} {slow}"
    shutil.copytree(ROOT / "examples" / name, made)
    made.chmod(0o777)
    if slow:
        program = made / "train.py"
        text = program.read_text()
        assert "    loss.backward()\n" in text
        program.write_text(text.replace("    loss.backward()\n", "    loss.backward()\n    __import__('time').sleep(0.15)\n"))
    return made


def newest(example: Path) -> RunDirectory:
    return RunDirectory(max(example.glob("runs/*/0*")))


def local(example: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, "--on", "local", *options], cwd=example, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})


def parameters(run: RunDirectory) -> Mapping[str, torch.Tensor]:
    saved = torch.load(run.path / "model.pt")
    assert saved["step"] == 40
    return saved["model"]  # type: ignore[no-any-return]


def assert_same(one: RunDirectory, other: RunDirectory) -> None:
    """But for the order in which gradients add up: DDP packs them anew after the first step of a process."""
    first, second = parameters(one), parameters(other)
    assert first.keys() == second.keys()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


@pytest.mark.timeout(300)
@pytest.mark.parametrize("forgets", [False, pytest.param(True, marks=pytest.mark.prove)])
def test_a_rank_is_killed_and_the_run_is_gone_on_with(tmp_path: Path, forgets: bool) -> None:
    """The control: a program that does not load the optimizer's state ends elsewhere."""
    whole = copy("torch-ddp", tmp_path)
    done = local(whole)
    assert done.returncode == 0 and "in 40 steps" in done.stdout, done.stdout + done.stderr

    disturbed = copy("torch-ddp", tmp_path, slow=True)
    if forgets:
        program = disturbed / "train.py"
        program.write_text(program.read_text().replace("    optimizer.load_state_dict", "    (lambda _: None)"))
    launched = subprocess.Popen([*LAUNCH, "--on", "local"], cwd=disturbed, text=True, stderr=subprocess.PIPE,
                                env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})
    until(lambda: list(disturbed.glob("runs/*/0001/model.pt")), "a checkpoint", 120)
    time.sleep(0.5)
    ranks = [process for process in psutil.Process(launched.pid).children(recursive=True) if "train.py" in process.cmdline()]
    ranks[1].send_signal(signal.SIGKILL)
    _, said = launched.communicate(timeout=60)
    assert launched.returncode == 1 and "rank 1 on node0 was killed by SIGKILL" in said, said
    again = local(disturbed, "--resume")
    assert again.returncode == 0, again.stderr
    assert "step 11 " in newest(disturbed).rank_log(0).read_text()
    if not forgets:
        assert_same(newest(whole), newest(disturbed))
        return
    with pytest.raises(AssertionError):
        assert_same(newest(whole), newest(disturbed))


@pytest.fixture
def shared(lab: Lab) -> Iterator[Path]:
    directory = lab.share / f"examples {os.urandom(2).hex()}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_a_node_dies_and_the_job_goes_on_without_it(lab: Lab, shared: Path) -> None:
    """Two hosts with two ranks each, started by an ordinary user; then the same with a host that dies."""
    own = {"PATH": PATH, "XDG_STATE_HOME": str(shared / "state"), "GLOO_SOCKET_IFNAME": "eth0"}
    options = ["--on", "slurm", "--set", "environment.health=false", "--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }']
    whole = copy("torch-ddp", shared)
    done = lab.run([*LAUNCH, *options, "--wait"], user="nobody", cwd=whole, timeout=200, environ=own)
    assert done.returncode == 0 and "in 40 steps" in done.stdout, done.stdout + done.stderr

    disturbed = copy("torch-ddp", shared, slow=True)
    done = lab.run([*LAUNCH, *options], cwd=disturbed, timeout=120, environ=own)
    assert done.returncode == 0, done.stderr
    run = newest(disturbed)
    until(lambda: (run.path / "model.pt").exists(), "a checkpoint", 120)
    victim = read_json(run.attempt_record)["hosts"][1]
    lab.kill(victim)
    until(lambda: verdict(run) is not None, "the end", 240)
    assert verdict(run).state == "completed" and run.attempt() == 2, run.main_log.read_text()  # type: ignore[union-attr]
    assert victim not in read_json(run.attempt_record)["hosts"]
    assert_same(newest(whole), run)
