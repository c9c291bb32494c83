"""The examples: each runs as it is, and ends with the parameters of an undisturbed run where it was killed and gone on with."""

from __future__ import annotations

import os
import re
import shutil
import signal
import subprocess
import sys
import time
import warnings
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import psutil
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from slurm_jobs import until
from slurm_lab.lab import Lab
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.outcome import verdict

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # where `python` is the one of the tests
LAUNCH = [sys.executable, "-m", "hpc_mp", "launch", "job.toml"]
Tensors = Mapping[str, torch.Tensor]


def of_shards(run: Path) -> Tensors:
    """All that ranks have saved as parts, put together."""
    reader = HuggingFaceStorageReader(str(run / "checkpoints/step-40"))
    whole: dict[str, Any] = {name: torch.empty(kept.size, dtype=kept.properties.dtype)  # type: ignore[union-attr]
                             for name, kept in reader.read_metadata().state_dict_metadata.items()}
    with warnings.catch_warnings(action="ignore"):  # that this is one process
        dcp.load(whole, storage_reader=reader, no_dist=True)
    return whole


def of_megatron(run: Path) -> Tensors:
    parts = {path.parent.name: torch.load(path)["model"] for path in run.glob("checkpoints/iter_0000040/*/model_optim_rng.pt")}
    assert len(parts) == 4  # tensor(2) × pipeline(2)
    return {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


def of_deepspeed(run: Path) -> Tensors:
    saved = run / "checkpoints/global_step40/mp_rank_00_model_states.pt"
    return torch.load(saved, weights_only=False)["module"]  # type: ignore[no-any-return]


def of_plate(run: Path) -> Tensors:
    with numpy.load(run / "plate.npz") as saved:
        return {name: torch.from_numpy(saved[name]) for name in saved}


@dataclass(frozen=True)
class Example:
    """What a test has to know of an example.

    pace: the words before which a step of it can be slowed down, so that it can be disturbed.
    first: what is there once it has saved for the first time.
    forget: words of it, and those in their place by which a resumed one begins with an optimizer that knows nothing.
    parameters: what a run has saved last. needs: a library that not every installation of the tests has.
    steps: those that rank 0 says something of; it saves after a quarter of them. seconds: that a slow one takes longer.
    """

    pace: str
    first: str
    forget: tuple[str, str]
    parameters: Callable[[Path], Tensors]
    needs: str = "torch"
    program: str = "train.py"
    steps: Sequence[int] = range(1, 41)
    seconds: float = 0.15

    @property
    def later(self) -> Sequence[int]:
        """The steps after it has saved for the first time."""
        return self.steps[len(self.steps) // 4:]

    @property
    def summary(self) -> str:
        return f"in {self.steps[-1]} steps"


EXAMPLES = {
    "torch-ddp": Example(
        "loss.backward()", "model.pt", ("    optimizer.load_state_dict", "    (lambda _: None)"),
        lambda run: torch.load(run / "model.pt")["model"]),  # type: ignore[no-any-return]
    "fsdp2": Example(
        "loss.backward()", "checkpoints/step-10",
        ('load(SAVED / f"step-{done}")', 'load(SAVED / f"step-{done}")\n        optimizer.state.clear()'), of_shards),
    "hf-trainer": Example(
        'print(f"step', "checkpoints/checkpoint-10/trainer_state.json",
        ("trainer.train(", "trainer._load_optimizer_and_scheduler = lambda *_: None\ntrainer.train("),
        lambda run: load_file(run / "checkpoints/checkpoint-40/model.safetensors"), "accelerate"),
    "accelerate": Example(
        "accelerator.backward(loss)", "checkpoints/step-10",
        ('step-{done}"))', 'step-{done}"))\n        optimizer.optimizer.state.clear()'),
        lambda run: load_file(run / "checkpoints/step-40/model.safetensors"), "accelerate"),
    "deepspeed": Example(
        "engine.backward(loss)", "checkpoints/latest",
        ("load_checkpoint(str(SAVED))", "load_checkpoint(str(SAVED), load_optimizer_states=False)"), of_deepspeed, "deepspeed"),
    "megatron": Example(
        "optimizer.step()", "checkpoints/latest_checkpointed_iteration.txt",
        ("    optimizer.load_state_dict", "    (lambda _: None)"), of_megatron),
    "mpi4py": Example(
        "change = world", "plate.npz", ("plate, done = ", "_, done = "), of_plate, "mpi4py",
        "solve.py", range(10, 401, 10), 0.02),
}
RANK_1 = {("RANK", "1"), ("OMPI_COMM_WORLD_RANK", "1"), ("PMI_RANK", "1")}
LONG = ("hf-trainer",)  # to start takes it long


def installed(name: str) -> Example:
    example = EXAMPLES[name]
    if find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    return example


def copy(name: str, directory: Path, slow: bool = False) -> Path:
    """An example in a directory with a blank in its path; slowed down, so that it can be disturbed."""
    made, of = directory / f"{name} {slow}", EXAMPLES[name]
    shutil.copytree(ROOT / "examples" / name, made)
    made.chmod(0o777)
    if slow:
        replace(made / of.program, of.pace, f"__import__('time').sleep({of.seconds}); {of.pace}")
    return made


def replace(program: Path, old: str, new: str) -> None:
    text = program.read_text()
    assert text.count(old) == 1, old
    program.write_text(text.replace(old, new))


def newest(example: Path) -> RunDirectory:
    return RunDirectory(max(example.glob("runs/*/0*")))


def local(example: Path, *options: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*LAUNCH, "--on", "local", *options], cwd=example, capture_output=True, text=True, timeout=200,
                          env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})


def steps(run: RunDirectory) -> list[int]:
    """Those that ranks of its newest attempt have printed: a rank that had found no others would have spoken too."""
    logs = [*run.path.glob("log/rank-*.log"), *run.path.glob("log/node-*.log")]
    return [int(step) for log in logs for step in re.findall(r"^(?:\d+: )?step (\d+) ", log.read_text(), re.MULTILINE)]


def assert_same(example: Example, one: RunDirectory, other: RunDirectory) -> None:
    """But for the order in which gradients add up: DDP packs them anew after the first step of a process."""
    first, second = example.parameters(one.path), example.parameters(other.path)
    assert first.keys() == second.keys() != set()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5


# --- on emulated nodes -----------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.prove] * (name in LONG)) for name in EXAMPLES
                                  if name != "torch-ddp"])  # which the next test but one begins with
def test_it_runs_as_it_is(tmp_path: Path, name: str) -> None:
    example, where = installed(name), copy(name, tmp_path)
    done = local(where)
    assert done.returncode == 0 and example.summary in done.stdout, done.stdout + done.stderr
    assert "export" not in done.stdout  # which is for checkpoints of our own engine
    assert steps(newest(where)) == list(example.steps)


@pytest.mark.prove
@pytest.mark.parametrize(("name", "told"), [("hf-trainer", "use_cpu=not torch.cuda.is_available()"),
                                            ("accelerate", "cpu=not torch.cuda.is_available()")])
def test_ranks_that_train_alone_would_be_seen(tmp_path: Path, name: str, told: str) -> None:
    """As they do without GPUs where the library is not told that there are none."""
    example, where = installed(name), copy(name, tmp_path)
    if torch.cuda.is_available():
        pytest.skip("there are GPUs")
    replace(where / example.program, told, "")
    local(where)
    assert steps(newest(where)) != list(example.steps)


@pytest.mark.timeout(600)
@pytest.mark.parametrize("forgets", [False, pytest.param(True, marks=pytest.mark.prove)])
@pytest.mark.parametrize("name", [pytest.param(name, marks=[pytest.mark.prove] * (name != "torch-ddp")) for name in EXAMPLES])
def test_a_rank_is_killed_and_the_run_is_gone_on_with(tmp_path: Path, name: str, forgets: bool) -> None:
    """The control: a program that does not load all of its state ends elsewhere. The undisturbed run has no hpc_mp."""
    example, whole = installed(name), copy(name, tmp_path)
    (whole / "hidden").mkdir()
    (whole / "hidden/hpc_mp.py").write_text("raise ImportError('not installed')\n")
    done = local(whole, "--set", f'program.environment={{ PYTHONPATH = "{whole}/hidden" }}')
    assert done.returncode == 0 and " steps" not in done.stdout, done.stdout + done.stderr
    assert steps(newest(whole)) == list(example.steps)

    disturbed = copy(name, tmp_path, slow=True)
    if forgets:
        replace(disturbed / example.program, *example.forget)
    launched = subprocess.Popen([*LAUNCH, "--on", "local"], cwd=disturbed, text=True, stderr=subprocess.PIPE,
                                env={**os.environ, "PATH": PATH, "PYTHONPATH": str(ROOT)})
    try:
        until(lambda: list(disturbed.glob(f"runs/*/0001/{example.first}")) or launched.poll() is not None, "a checkpoint", 200)
        time.sleep(0.5)
        ranks = [each for each in psutil.Process(launched.pid).children(recursive=True) if example.program in each.cmdline()]
        next(each for each in ranks if RANK_1 & each.environ().items()).send_signal(signal.SIGKILL)
        _, said = launched.communicate(timeout=60)
    finally:
        launched.terminate()
    assert launched.returncode == 1 and "rank 1 on node0 was killed by SIGKILL" in said, said
    again = local(disturbed, "--resume")
    assert again.returncode == 0, again.stderr
    assert steps(newest(disturbed)) == list(example.later)
    if not forgets:
        assert_same(example, newest(whole), newest(disturbed))
        return
    with pytest.raises(AssertionError):
        assert_same(example, newest(whole), newest(disturbed))


# --- on Slurm --------------------------------------------------------------------------------------------------------


@pytest.fixture
def shared(lab: Lab) -> Iterator[Path]:
    directory = lab.share / f"examples {os.urandom(2).hex()}"
    directory.mkdir()
    directory.chmod(0o777)
    yield directory
    lab.mend()
    shutil.rmtree(directory, ignore_errors=True)


@pytest.mark.prove
@pytest.mark.timeout(600)
@pytest.mark.parametrize("name", EXAMPLES)
def test_a_node_dies_and_the_job_goes_on_without_it(lab: Lab, shared: Path, name: str) -> None:
    """Two hosts, started by an ordinary user; then the same with a host that dies."""
    example = installed(name)
    own = {"PATH": PATH, "XDG_STATE_HOME": str(shared / "state"), "GLOO_SOCKET_IFNAME": "eth0"}
    options = ["--on", "slurm", "--set", "environment.health=false", "--set", 'environment.set={ GLOO_SOCKET_IFNAME = "eth0" }']
    whole = copy(name, shared)
    done = lab.run([*LAUNCH, *options, "--wait"], user="nobody", cwd=whole, timeout=200, environ=own)
    assert done.returncode == 0 and example.summary in done.stdout, done.stdout + done.stderr
    assert steps(newest(whole)) == list(example.steps)

    disturbed = copy(name, shared, slow=True)
    done = lab.run([*LAUNCH, *options], cwd=disturbed, timeout=120, environ=own)
    assert done.returncode == 0, done.stderr
    run = newest(disturbed)
    until(lambda: (run.path / example.first).exists(), "a checkpoint", 120)
    victim = read_json(run.attempt_record)["hosts"][1]
    lab.kill(victim)
    until(lambda: verdict(run) is not None, "the end", 240)
    assert verdict(run).state == "completed" and run.attempt() == 2, run.main_log.read_text()  # type: ignore[union-attr]
    assert victim not in read_json(run.attempt_record)["hosts"]
    assert steps(run)[-1] == example.steps[-1] and steps(run)[0] > example.steps[0]
    assert_same(example, newest(whole), run)
