"""Small real jobs for the exactness tests: text with partly ignored labels, tiny models, and runs of whole ranks."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from ranks import exit_codes
from tables import swapped, table
from torch import Tensor

from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import family_of
from hpc_mp.layout.models.adapter_weights import trained_weights
from hpc_mp.layout.placement import RankPlace, to_dict
from hpc_mp.rundir import RunDirectory, create_run, newest_complete, read_lines, write_json
from hpc_mp.rundir.checkpoint_index import read_indexes
from hpc_mp.train.checkpoint.shard_file import LocalPart, ShardReader
from hpc_mp.train.rank.bootstrap import lay_out

MODELS: dict[str, str] = table(__file__, "layouts.toml", "models")


def varied(model: str, swaps: Sequence[str], more: str) -> str:
    """Return the configuration of a model in which texts are swapped, and to which others are added."""
    text = swapped(MODELS[model], swaps)
    return f"{text}, {more}" if more else text


VARIANTS = {name: varied(*row) for name, row in table(__file__, "layouts.toml", "variants").items()}

FAMILIES: dict[str, str] = table(__file__, "layouts.toml", "families")
MASKED: dict[str, str] = table(__file__, "layouts.toml", "masked")
STACKS: dict[str, str] = table(__file__, "layouts.toml", "stacks")

DEVICE = os.environ.get("TEST_DEVICE", "cpu")  # the device of the engine; plain transformers always uses the CPU
JOB = table(__file__, "layouts.toml", "job").replace("{device}", DEVICE)


@dataclass(frozen=True)
class RankState:
    """The state of a rank.

    Attributes:
        memory: bytes by kind after the traced step.
        chunks: whose activations it held at once at most in that step.
        formats: of its final parameters.
    """

    place: RankPlace
    memory: Mapping[str, int]
    chunks: int
    formats: frozenset[str]


@dataclass(frozen=True)
class Result:
    """The result of a run.

    Attributes:
        losses, norms: of every step; None in a step without labels.
        parameters: the final ones, in the engine's shapes.
        dropped: the share of expert choices dropped in every step; None without a capacity.
        routers: the routers' addition to the loss of every step.
        evaluations: step, loss and number of labels of every evaluation.
        apart: the largest difference between copies of a parameter on two ranks.
        ranks: the state of every rank; nothing for a run with a run directory, which has it in traces.
    """

    losses: tuple[Any, ...]
    norms: tuple[Any, ...]
    parameters: dict[str, Tensor]
    dropped: tuple[Any, ...]
    routers: tuple[float, ...] = ()
    evaluations: tuple[tuple[int, float, int], ...] = ()
    apart: float = 0.0
    ranks: tuple[RankState, ...] = ()

    def distance(self, other: "Result") -> float:
        """Return the largest difference of any loss, norm or parameter, and of ``apart``."""
        assert self.parameters.keys() == other.parameters.keys(), self.parameters.keys() ^ other.parameters.keys()
        pairs = [*zip(self.losses, other.losses, strict=True), *zip(self.norms, other.norms, strict=True)]
        assert all((a is None) == (b is None) for a, b in pairs)
        numbers = [abs(a - b) for a, b in pairs if a is not None]
        tensors = [float((self.parameters[name] - other.parameters[name]).abs().max()) for name in self.parameters]
        differences = torch.tensor([*numbers, *tensors, abs(self.apart - other.apart)], dtype=torch.float64)
        return float(differences.nan_to_num(nan=math.inf, posinf=math.inf).max())


def write_text(directory: Path) -> None:
    """Write rows of prompts and completions. Prompt tokens do not count in the loss, so counts differ between microbatches."""
    words = (Path(json.__file__).read_text() + Path(json.decoder.__file__).read_text()).split()
    rows = []
    for start in range(0, len(words) - 40, 23):
        cut = start + 3 + start % 17
        rows.append({"prompt": " ".join(words[start:cut]), "completion": " " + " ".join(words[cut:start + 23])})
    (directory / "text.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))


def write_job(directory: Path, model: str = "gpt2", more: str = "") -> Path:
    """Write a job file and its text; the directory is created."""
    directory.mkdir(parents=True, exist_ok=True)
    write_text(directory)
    path = directory / "job.toml"
    path.write_text(JOB.format(model=MODELS[model]) + more)
    return path


def job(directory: Path, model: str, overrides: Sequence[str] = ()) -> JobSpec:
    path = directory / f"{model}.toml"
    path.write_text(JOB.format(model=(MODELS | VARIANTS | FAMILIES | STACKS)[model]))
    return load_job(path, overrides)


def layout(tensor: int = 1, pipeline: int = 1, data: int = 1, context: int = 1, **more: object) -> list[str]:
    """Return overrides of a job: the degrees, and further keys of ``[parallel]``."""
    settings = {"tensor": tensor, "pipeline": pipeline, "context": context} | more
    return [f"job.ranks_per_node={tensor * pipeline * data * context}",
            *(f"parallel.{key}={value}" for key, value in settings.items())]


def start(spec: JobSpec) -> RunDirectory:
    """Create a run directory as ``launch`` writes it."""
    run = create_run(Path(spec.job.directory), spec.job.name)
    prepare(spec, run)
    return run


def prepare(spec: JobSpec, run: RunDirectory) -> None:
    """Write the files that ``launch`` and ``launch --resume`` write before they start the ranks."""
    run.job.write_text(dump_job(spec))
    write_json(run.placement, to_dict(lay_out(spec)))


def run_whole(spec: JobSpec, before: Callable[[], None] = lambda: None, run: RunDirectory | None = None) -> Result:
    """Train as ``launch`` does, on forked ranks with a run directory and a checkpoint, from which the parameters are read.

    Args:
        before: called in every rank first, to break something on purpose.
    """
    run = run or start(spec)
    assert exit_codes(spec.ranks, run.job, before, timeout=600.0) == [0] * spec.ranks, run.main_log.read_text()
    checkpoint, skipped = newest_complete(run.checkpoints)
    assert checkpoint is not None and not skipped
    losses, norms, dropped, routers = (tuple(line[key] for line in read_lines(run.metrics))
                                       for key in ("loss", "grad_norm", "dropped_share", "router_loss"))
    evaluations = tuple((line["step"], line["loss"], line["label_tokens"]) for line in read_lines(run.evaluations))
    return Result(losses, norms, parameters(spec, checkpoint), dropped, routers, evaluations)


def trained_run(spec: JobSpec, before: Callable[[], None] = lambda: None) -> RunDirectory:
    run = start(spec)
    run_whole(spec, before, run)
    return run


def relaunch(run: RunDirectory, directory: Path, model: str, overrides: Sequence[str],
             before: Callable[[], None] = lambda: None) -> Result:
    spec = job(directory, model, overrides)
    prepare(spec, run)
    return run_whole(spec, before, run)


def unfilled(spec: JobSpec) -> dict[str, Tensor]:
    """Return a NaN for every number of every parameter that is trained, in the engine's shapes."""
    shape = read_shape(spec)
    return {w.name: torch.full(w.shape, math.nan, dtype=torch.float64) for w in trained_weights(family_of(shape), shape)}


def parameters(spec: JobSpec, checkpoint: Path) -> dict[str, Tensor]:
    state = unfilled(spec)
    whole = [LocalPart(name, tuple(values.shape), tuple(slice(0, size) for size in values.shape), values)
             for name, values in state.items()]
    ShardReader(checkpoint, read_indexes(checkpoint)).read(whole)
    return state
