"""The examples: each runs as it is, and one that resumes ends with the parameters of an undisturbed run."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path

import psutil
import pytest
import torch
from slurm_jobs import until
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory, history, read_json
from hpc_mp.rundir.outcome import verdict

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `python` is the one of the tests
LAUNCH = [sys.executable, "-m", "hpc_mp", "launch", "job.toml"]


def copy(name: str, directory: Path, slow: float = 0.0) -> Path:
    """An example in a directory with a blank in its path; slowed down by so many seconds a step, so that it can be disturbed."""
    made = directory / f"{name} {slow}"
    shutil.copytree(ROOT / "examples" / name, made)
    made.chmod(0o777)
    if slow:
        program = made / "train.py"
        text = program.read_text()
        assert "    loss.backward()\n" in text
        program.write_text(text.replace("    loss.backward()\n", f"    loss.backward()\n    __import__('time').sleep({slow})\n"))
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

    disturbed = copy("torch-ddp", tmp_path / "disturbed")
    program, stands = disturbed / "train.py", disturbed / "stands"  # rank 1 stands still once all have saved what step 10 came to
    line = "    loss.backward()\n"
    assert program.read_text().count(line) == 1
    program.write_text(program.read_text().replace(line, line + (
        "    if (rank, step) == (1, 12) and not done:\n"
        f"        Path({str(stands)!r}).touch()\n        __import__('time').sleep(600)\n")))
    if forgets:
        program.write_text(program.read_text().replace("    optimizer.load_state_dict", "    (lambda _: None)"))
    launched = subprocess.Popen([*LAUNCH, "--on", "local"], cwd=disturbed, text=True, stderr=subprocess.PIPE,
                                env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})
    until(stands.exists, "rank 1 in step 12", 120)
    ranks = [process for process in psutil.Process(launched.pid).children(recursive=True) if "train.py" in process.cmdline()]
    next(each for each in ranks if ("RANK", "1") in each.environ().items()).send_signal(signal.SIGKILL)
    _, said = launched.communicate(timeout=120)
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


OPTIONS = ("--on", "slurm", "--set", "environment.health=false", "--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }',
           "--set", "program.silent_limit=25")


def own(shared: Path) -> dict[str, str]:
    return {"PATH": PATH, "XDG_STATE_HOME": str(shared / "state"), "GLOO_SOCKET_IFNAME": "eth0"}


def sent(lab: Lab, run: RunDirectory, number: str) -> None:
    """A signal to one of the ranks of the second host."""
    host = read_json(run.attempt_record)["hosts"][1]
    killed = lab.at(host, ["bash", "-c", f"kill -{number} $(pgrep -f '^python train.py' | tail -n 1)"])
    assert killed.returncode == 0, killed.stderr


def preempted(lab: Lab, run: RunDirectory) -> None:
    """A job of a better partition wants all nodes."""
    lab.run(["scontrol", "create", "PartitionName=better", "Nodes=ALL", "PriorityTier=10", "PreemptMode=OFF"], check=True)
    lab.sbatch("--partition=better", f"--nodes={len(lab.nodes)}", "--exclusive", "--wrap=sleep 5")


def node_dies(lab: Lab, run: RunDirectory) -> None:
    lab.kill(read_json(run.attempt_record)["hosts"][1])


def link_is_cut(lab: Lab, run: RunDirectory) -> None:
    lab.link(read_json(run.attempt_record)["hosts"][1], up=False)


# (what is done to the run once it has saved, seconds that each step is slowed by, kind of the first attempt's end, options)
FAULTS: dict[str, tuple[Callable[[Lab, RunDirectory], None], float, tuple[str, ...], tuple[str, ...]]] = {
    "a node dies": (node_dies, 0.3, ("node",), ()),
    "a link is cut": (link_is_cut, 0.3, ("node",), ()),
    "a rank is killed": (lambda lab, run: sent(lab, run, "KILL"), 0.3, ("signal",), ()),
    "a rank is stopped": (lambda lab, run: sent(lab, run, "STOP"), 0.3, ("hang",), ()),
    "the time is up": (lambda lab, run: None, 1.4, ("stopped",), ("--set", "job.time_limit=1")),
    "preemption": (preempted, 0.3, ("stopped",), ()),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    whole = copy("torch-ddp", tmp_path_factory.mktemp("undisturbed"))
    done = local(whole)
    assert done.returncode == 0, done.stdout + done.stderr
    return newest(whole)


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("fault", FAULTS)
def test_a_job_goes_on_after_what_is_no_fault_of_the_program(fault: str, undisturbed: RunDirectory) -> None:
    """On two hosts with two ranks each; the parameters are those of a run that nothing has disturbed."""
    happens, slow, kinds, more = FAULTS[fault]
    preemption = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
    with Lab(overrides={"KillWait": "2", **preemption}) as lab:
        example = copy("torch-ddp", lab.share, slow)
        done = lab.run([*LAUNCH, *OPTIONS, *more], cwd=example, timeout=120, environ=own(lab.share))
        assert done.returncode == 0, done.stderr
        run = newest(example)
        until(lambda: (run.path / "model.pt").exists(), "a checkpoint", 120)
        hosts = read_json(run.attempt_record)["hosts"]
        happens(lab, run)
        until(lambda: verdict(run) is not None, "the end", 240)
        said = run.main_log.read_text() + run.path.joinpath("history.jsonl").read_text()
        assert verdict(run).state == "completed" and run.attempt() >= 2, said  # type: ignore[union-attr]
        end = history.history(run)[0]
        assert end.kind in kinds, said
        later = read_json(run.attempt_record)["hosts"]
        assert (hosts[1] in end.nodes) == (end.kind == "node") == (hosts[1] not in later), said
        assert "step 1 " not in run.node_log(later[0]).read_text(), "it began anew"
        assert_same(undisturbed, run)


@pytest.mark.prove
@pytest.mark.timeout(300)
def test_an_ordinary_user_runs_it_on_two_hosts(lab: Lab, shared: Path, undisturbed: RunDirectory) -> None:
    whole = copy("torch-ddp", shared)
    done = lab.run([*LAUNCH, *OPTIONS, "--wait"], user="nobody", cwd=whole, timeout=200, environ=own(shared))
    assert done.returncode == 0 and "in 40 steps" in done.stdout, done.stdout + done.stderr
    assert_same(undisturbed, newest(whole))
