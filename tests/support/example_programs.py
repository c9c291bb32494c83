"""The example programs, and the data that tests need to disturb each and to compare its results."""

import os
import re
import shutil
import subprocess
import sys
import warnings
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import numpy
import pytest
import torch
import torch.distributed.checkpoint as dcp
from safetensors.torch import load_file
from torch.distributed.checkpoint.hf_storage import HuggingFaceStorageReader

from hpc_mp.rundir import RunDirectory

ROOT = Path(__file__).resolve().parents[2]
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"  # on which `python` is that of the tests
LAUNCH = [sys.executable, "-m", "hpc_mp", "launch", "job.toml"]
Tensors = Mapping[str, torch.Tensor]


def of_shards(run: Path) -> Tensors:
    """Return the parts that the ranks have saved, assembled."""
    reader = HuggingFaceStorageReader(str(run / "checkpoints/step-40"))
    whole: dict[str, Any] = {name: torch.empty(kept.size, dtype=kept.properties.dtype)  # type: ignore[union-attr]
                             for name, kept in reader.read_metadata().state_dict_metadata.items()}
    with warnings.catch_warnings(action="ignore"):  # the warning that this is one process
        dcp.load(whole, storage_reader=reader, no_dist=True)
    return whole


def of_megatron(run: Path) -> Tensors:
    parts = {path.parent.name: torch.load(path)["model"] for path in run.glob("checkpoints/iter_0000040/*/model_optim_rng.pt")}
    assert len(parts) == 4  # tensor(2) × pipeline(2)
    return {f"{part}.{name}": value for part, held in parts.items() for name, value in held.items()}


def of_deepspeed(run: Path) -> Tensors:
    saved = run / "checkpoints/global_step40/mp_rank_00_model_states.pt"
    return torch.load(saved, weights_only=False)["module"]  # type: ignore[no-any-return]


def of_ddp(run: Path) -> Tensors:
    saved = torch.load(run / "model.pt")
    assert saved["step"] == 40
    return saved["model"]  # type: ignore[no-any-return]


def of_plate(run: Path) -> Tensors:
    with numpy.load(run / "plate.npz") as saved:
        return {name: torch.from_numpy(saved[name]) for name in saved}


@dataclass(frozen=True)
class Example:
    """The data that a test needs about an example.

    pace: the source text before which a step can be slowed down, so that the example can be disturbed.
    first: the path that exists after the first save.
    forget: source text, and its replacement that makes a resumed run lose a part of the saved state.
    parameters: reads the last state that a run saved. needs: a library that may not be installed.
    steps: the steps that rank 0 reports; it saves after a quarter of them. seconds: the delay per step of a slow example.
    ranks: the number with which it makes these steps.
    """

    pace: str
    first: str
    forget: tuple[str, str]
    parameters: Callable[[Path], Tensors]
    needs: str = "torch"
    program: str = "train.py"
    steps: Sequence[int] = range(1, 41)
    seconds: float = 0.15
    ranks: int = 2

    @property
    def later(self) -> Sequence[int]:
        """The steps after the first save."""
        return self.steps[len(self.steps) // 4:]

    @property
    def summary(self) -> str:
        return f"in {self.steps[-1]} steps" if self.steps[0] == 1 else f"in steps {self.steps[0]} to {self.steps[-1]}"


EXAMPLES = {
    "torch-ddp": Example(
        "loss.backward()", "model.pt", ("    optimizer.load_state_dict", "    (lambda _: None)"), of_ddp),
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
        lambda run: load_file(run / "checkpoints/step-40/model.safetensors"), "accelerate", ranks=4),
    "deepspeed": Example(
        "engine.backward(loss)", "checkpoints/latest",
        ("load_checkpoint(str(SAVED))", "load_checkpoint(str(SAVED), load_optimizer_states=False)"), of_deepspeed, "deepspeed"),
    "megatron": Example(
        "optimizer.step()", "checkpoints/latest_checkpointed_iteration.txt",
        ("    optimizer.load_state_dict", "    (lambda _: None)"), of_megatron, ranks=4),  # it cuts its model in four
    "mpi4py": Example(
        "change = world", "plate.npz", ('plate, done = saved["plate"]', '_, done = saved["plate"]'), of_plate, "mpi4py",
        "solve.py", range(10, 401, 10), 0.02),
}
RANK_1 = {("RANK", "1"), ("OMPI_COMM_WORLD_RANK", "1"), ("PMI_RANK", "1")}


def installed(name: str) -> Example:
    example = EXAMPLES[name]
    if find_spec(example.needs) is None:
        pytest.skip(f"{example.needs} is not installed")
    return example


def copy(name: str, directory: Path, delay: float = 0.0) -> Path:
    """Copy an example to a directory with a blank in its path; with seconds added to each step, so that it can be disturbed."""
    made, of = directory / f"{name} {delay}", EXAMPLES[name]
    shutil.copytree(ROOT / "examples" / name, made)
    made.chmod(0o777)
    if delay:
        replace(made / of.program, of.pace, f"__import__('time').sleep({delay}); {of.pace}")
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
    """Return the steps that ranks of the newest attempt have printed: isolated ranks would have printed them too."""
    logs = [*run.path.glob("log/rank-*.log"), *run.path.glob("log/node-*.log")]
    return [int(step) for log in logs for step in re.findall(r"^(?:\d+: )?step (\d+) ", log.read_text(), re.MULTILINE)]


def assert_same(example: Example, one: RunDirectory, other: RunDirectory) -> None:
    """Assert equal parameters, up to the summation order of gradients: DDP rebuilds its buckets after a process's first step."""
    first, second = example.parameters(one.path), example.parameters(other.path)
    assert first.keys() == second.keys() != set()
    assert max(float((first[name] - second[name]).abs().max()) for name in first) < 1e-5
