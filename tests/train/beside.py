"""Any staged model on forked ranks, beside one process of plain torch or transformers that trains on the same batches."""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from engines import _leave, _store
from ranks import run_ranks
from torch import Tensor, nn

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models.tensor import kv_copies
from hpc_mp.layout.placement import place
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import build, everyone
from hpc_mp.train.parallel.dropout import DropoutClock, HashDropout, Moment
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.pipeline.stage import Microbatches, StagedModel
from hpc_mp.train.rank.assemble import home_of
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.settings import EngineSettings

SAMPLES, STEPS, SEED = 8, 2, 3

Report = tuple[list[float], list[float], list[tuple[str, Any, Any]]]  # losses, norms, and parts of parameters
Reference = tuple[list[float], list[float], dict[str, Tensor]]  # the parameters whole


@dataclass(frozen=True)
class Settings:
    optimizer: Literal["adamw"] = "adamw"
    betas: tuple[float, float] = (0.9, 0.95)
    eps: float = 0.1
    weight_decay: float = 0.1
    no_decay: tuple[str, ...] = ("*.bias", "*[nN]orm.weight")
    lr_factors: Mapping[str, float] = field(default_factory=dict)
    momentum: float = 0.0
    muon_momentum: float = 0.95
    clip: float = 0.5
    steps: int = STEPS
    learning_rate: float = 0.05
    lr_schedule: str = "constant"
    lr_schedule_options: None = None
    warmup_steps: int = 0


def share(layout: Layout, replica: int, step: int, batch: Mapping[str, Tensor]) -> Microbatches:
    own = SAMPLES // layout.degrees.data
    mine = range(own * replica, own * (replica + 1))

    def rows(microbatch: int) -> range:
        return mine[microbatch * layout.samples:(microbatch + 1) * layout.samples]

    numbers = range(layout.microbatches)
    batches = {(stage, number): {name: tensor[rows(number)] for name, tensor in batch.items()}
               for number in numbers for stage in range(layout.stages)}
    return Microbatches(batches, [Moment(step, tuple(rows(number))) for number in numbers],
                        int((batch["labels"][mine] != -100).sum()))


def on_rank(layout: Layout, model: StagedModel, values: Source, batches: Sequence[Mapping[str, Tensor]]) -> Report:
    """Train any model on a rank. ``batches``: the global one of each step."""
    engine = engine_of(layout, model)
    engine.start(values)
    losses, norms = stepped(engine, dict(enumerate(batches)))
    return losses, norms, parts_at_end(engine)


def engine_of(layout: Layout, model: StagedModel, ties: list[tuple[int, ...]] | None = None) -> Engine:
    """Meet the other ranks. ``ties``: as for ``communicators.build``."""
    torch.set_num_threads(1)
    who, schedule, device = identity(os.environ), schedule_of(layout), torch.device("cpu")
    gloo.register()
    dist.init_process_group("gloo", store=dist.PrefixStore("list", _store()), rank=who.rank, world_size=who.world)
    copies = kv_copies(model.shape, layout.degrees.tensor) if isinstance(model, TransformersModel) else ()
    groups = build(place(layout.degrees, "DPT", 8), layout.shard_degree, device, "gloo", schedule, None, everyone(), copies,
                   ties=ties)
    return Engine(model, EngineSettings(layout, schedule, SEED, Settings(), home=home_of(layout)), groups, device)


def stepped(engine: Engine, batches: Mapping[int, Mapping[str, Tensor]]) -> tuple[list[float], list[float]]:
    """Train steps by number. Returns losses and norms."""
    results = [engine.step(step, share(engine.settings.layout, engine.groups.data_rank, step, batch)).numbers()
               for step, batch in batches.items()]
    return [step.loss for step in results], [step.norm for step in results]


def parts_at_end(engine: Engine) -> list[tuple[str, Any, Any]]:
    """Leave the other ranks. Returns this one's parts of the parameters."""
    parts = [(held.key, held.box, held.values.numpy().copy()) for held in engine.held() if not held.key.startswith("optimizer.")]
    _leave(engine.groups.host)
    return parts


class Flat(HashDropout):
    """Dropout of the reference: elements are numbered as they lie, and so are calls."""

    def __init__(self, dropout: nn.Dropout, site: str, clock: DropoutClock, calls: int = 1) -> None:
        super().__init__(dropout.p, site, clock, torch.empty(0), calls)

    def forward(self, x: Tensor) -> Tensor:
        return self.dropped(x, torch.arange(x.shape[1:].numel(), dtype=torch.int32).view(x.shape[1:]))


def drop_flat(module: nn.Module, clock: DropoutClock) -> None:
    """Put dropouts of the reference in place of torch's."""
    made: dict[int, Flat] = {}
    for path, inner in list(module.named_modules(remove_duplicate=False)):
        if isinstance(inner, nn.Dropout):
            parent, _, leaf = path.rpartition(".")
            holder = module.get_submodule(parent)
            setattr(holder, leaf, made.setdefault(id(inner), Flat(inner, path, clock, getattr(holder, "drops", 1))))


def by_torch(loss_of: Callable[[Mapping[str, Tensor]], tuple[Tensor, Tensor]], named: Mapping[str, nn.Parameter],
             clock: DropoutClock, batches: Sequence[Mapping[str, Tensor]], apart: int = 0) -> Reference:
    """Train by torch alone, given the summed loss of a batch and its number of labels. ``apart``: as for ``steps``."""
    settings = Settings()
    spared = [any(fnmatchcase(name, pattern) for pattern in settings.no_decay) for name in named]
    groups = [{"params": [parameter for parameter, spares in zip(named.values(), spared, strict=True) if spares is kind],
               "weight_decay": 0.0 if kind else settings.weight_decay} for kind in (False, True)]
    optimizer = torch.optim.AdamW(groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, foreach=False)
    losses, norms = [], []
    for step, batch in enumerate(batches):
        clock.set(Moment(step, tuple(range(step * apart, step * apart + SAMPLES))))
        loss, labels = loss_of(batch)
        (loss / labels).backward()
        losses.append(loss.item() / int(labels))
        norms.append(float(torch.nn.utils.clip_grad_norm_(named.values(), settings.clip)))
        optimizer.step()
        optimizer.zero_grad()
    return losses, norms, {name: parameter.detach() for name, parameter in named.items()}


class PlainTraining(Protocol):
    """A model of transformers, and its batches."""

    def model(self, recompute: str = "none") -> TransformersModel: ...

    def batches(self) -> Sequence[Mapping[str, Tensor]]: ...


Trained = TypeVar("Trained", bound=PlainTraining)


def distance_of(sequence: int, values: Callable[[TransformersModel], Source], plain: Callable[[Trained], Reference]) -> Any:
    """Return a function that returns the largest difference of any loss, norm or parameter between the engine and ``plain``
    transformers.

    Args:
        sequence: tokens of a sample.
        values: the first ones of a model.
    """
    def distance(layout: Layout, training: Trained, reference: Trained | None = None,
                 before: Callable[[], None] = lambda: None) -> float:
        """``before``: called in every rank first."""
        def rank() -> Report:
            before()
            model = training.model(layout.recompute)
            return on_rank(replace(layout, sequence=sequence), model, values(model), training.batches())

        return apart(run_ranks(layout.ranks, rank), partial(plain, reference or training))

    return distance


def apart(reports: Sequence[Report], reference: Callable[[], Reference]) -> float:
    """Return the same of what ranks report of the last steps."""
    losses, norms, parameters = _computed(pickle.dumps(reference))
    differences = [abs(a - b) for report in reports for mine, other in ((report[0], losses), (report[1], norms))
                   for a, b in zip(mine, other[-len(mine):], strict=True)]
    parts = [part for report in reports for part in report[2]]
    assert {key for key, _, _ in parts} == parameters.keys()
    return max(differences + [float((parameters[key][box] - torch.from_numpy(values)).abs().max())
                              for key, box, values in parts if values.size])


@cache
def _computed(reference: bytes) -> Reference:
    """Return the result of a reference, which is pickled so that another layout's is known to be the same."""
    result: Reference = run_ranks(1, pickle.loads(reference))[0]
    return result
