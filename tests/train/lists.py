"""Small models that are not Hugging Face's, on forked ranks and in one process of plain torch.

They have a skip, two tensors between stages, a tied weight on three stages, a buffer, dropout, and an objective of two terms.
"""

import os
import pickle
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from fnmatch import fnmatchcase
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any, Literal, Protocol, TypeVar

import torch
import torch.distributed as dist
from engines import _leave, _store
from ranks import run_ranks
from torch import Tensor, nn

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models.tensor import kv_copies
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.layout.schedule.names import STAGES_PER_RANK
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir import read_json
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.model.layer_list import LayerSpec
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import build, everyone
from hpc_mp.train.parallel.dropout import DropoutClock, HashDropout, Moment
from hpc_mp.train.parallel.fill import Source
from hpc_mp.train.pipeline.stage import Carried, Microbatches, StagedModel
from hpc_mp.train.rank.assemble import home_of
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.settings import EngineSettings

WORDS, WIDTH, LENGTH, SAMPLES, STEPS, SEED = 23, 12, 5, 8, 2, 3


class Split(nn.Module):
    """Gives two tensors, and drops twice with one module: what is cut and what is not."""

    drops = 2

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(WIDTH), nn.Linear(WIDTH, 22), nn.Linear(22, WIDTH)
        self.drop = self.again = nn.Dropout(0.3)

    def forward(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        return hidden + self.again(self.down(self.drop(self.up(self.norm(hidden)).tanh()))), hidden * 2


class Block(nn.Module):
    """Uses a tensor of the batch, and has a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.up, self.down, self.drop = nn.Linear(WIDTH, 16), nn.Linear(16, WIDTH, bias=False), nn.Dropout(0.2)
        self.register_buffer("slope", torch.linspace(0.5, 1.5, WIDTH))

    def forward(self, hidden: Tensor, weight: Tensor) -> Tensor:
        return hidden + self.drop(self.down(self.up(hidden * self.slope).relu())) * weight.unsqueeze(-1)


class Mind(nn.Module):
    """Attention of four heads, whose weights are dropped: tensor ranks have heads of their own."""

    def __init__(self) -> None:
        super().__init__()
        self.query, self.key, self.value, self.out = (nn.Linear(WIDTH, WIDTH) for _ in range(4))
        self.drop = nn.Dropout(0.25)

    def forward(self, hidden: Tensor) -> Tensor:
        query, key, value = (project(hidden).unflatten(-1, (-1, WIDTH // 4)).transpose(1, 2)
                             for project in (self.query, self.key, self.value))
        weights = self.drop((query @ key.transpose(2, 3)).softmax(-1))
        return hidden + self.out((weights @ value).transpose(1, 2).flatten(2))


class Join(nn.Module):
    """The other end of the skip; gives what the second term of the loss needs. It has a tensor that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.mix, self.shape = nn.Linear(2 * WIDTH, WIDTH), torch.linspace(0.7, 1.1, WIDTH)

    def forward(self, hidden: Tensor, skip: Tensor) -> tuple[Tensor, Tensor]:
        return self.mix(torch.cat((hidden * self.shape.to(hidden.dtype), skip), -1)), hidden.square().mean(-1)


class Words(nn.Module):
    """Scores of all words."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.empty(WORDS, WIDTH))

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden @ self.weight.t()


class Peek(Words):
    """A third use of the tied weight, in the middle."""

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + (hidden @ self.weight.t()).softmax(-1) @ self.weight


CUT: Mapping[str, Literal["column", "row"]] = {"up": "column", "down": "row"}
TIED = {"weight": "words.weight"}
LAYERS = (
    LayerSpec("words", lambda: nn.Embedding(WORDS, WIDTH), ("ids",)),
    LayerSpec("split", Split, gives=("hidden", "skip"), cut=CUT),
    LayerSpec("block", Block, ("hidden", "weight"), cut=CUT),
    LayerSpec("peek", Peek, tied=TIED),
    LayerSpec("mind", Mind, cut={"query": "column", "key": "column", "value": "column", "out": "row"}),
    LayerSpec("join", Join, ("hidden", "skip"), ("hidden", "extra")),
    LayerSpec("head", Words, gives=("scores",), tied=TIED),
)


def objective(outputs: Mapping[str, Tensor], batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Two terms, of scores and of another output, if there is one."""
    scores, *more = outputs.values()
    extra = more[0] if more else scores.mean(-1)
    counted = batch["labels"] != -100
    loss = nn.functional.cross_entropy(scores.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss + 0.1 * (extra * counted).sum(), counted.sum()


def data(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels = torch.randint(WORDS, (SAMPLES, LENGTH), generator=generator)
    labels[torch.rand(SAMPLES, LENGTH, generator=generator) < 0.3] = -100
    return {"ids": ids, "input": ids, "labels": labels,
            "weight": torch.rand(SAMPLES, LENGTH, generator=generator, dtype=torch.float64)}


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


def listed(samples: int, layers: Sequence[LayerSpec] = LAYERS) -> ListedModel:
    size = (samples, LENGTH)
    batch = {name: Carried(size, torch.int64, False) for name in ("ids", "input", "labels")}
    batch["weight"] = Carried(size, torch.float32, False)
    return ListedModel(tuple(layers), objective, SEED, ("scores", "extra"), batch)


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


Report = tuple[list[float], list[float], list[tuple[str, Any, Any]]]  # losses, norms, and parts of parameters


def trained(layout: Layout, make: Callable[[int], ListedModel] = listed, numbers: range = range(STEPS), begin: Path | None = None,
            end: Path | None = None) -> Report:
    """Train on a rank, and evaluate. Returns losses, norms and its parts of the parameters.

    Args:
        numbers: of the steps.
        begin, end: checkpoints that it begins with and ends with.
    """
    model = make(layout.samples)
    engine = engine_of(layout, model, list(model.ties(layout).values()))
    if begin is None:
        engine.start(model.first_values())
    else:
        checkpoint.load(begin, engine.held(), engine.groups.host)
        engine.restored(read_json(begin / COUNTERS)["step"])
    losses, norms = stepped(engine, {step: data(step) for step in numbers})
    evaluated = engine.evaluate(share(layout, engine.groups.data_rank, numbers.stop, data(numbers.stop)))
    if end is not None:
        checkpoint.Writing(end, numbers.stop, {"step": numbers.stop}, engine.groups).write_all(engine.held())
    return [*losses, evaluated.loss / evaluated.labels], norms, parts_at_end(engine)


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


Reference = tuple[list[float], list[float], dict[str, Tensor]]


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


def plain(count: int = STEPS, make: Callable[[int], ListedModel] = listed, apart: int = 0) -> Reference:
    """One process of plain torch on the same batches. ``apart``: as for ``steps``."""
    model, clock = make(SAMPLES), DropoutClock(SEED)
    modules = nn.ModuleDict({spec.name: model.made(spec) for spec in model.layers}).double()
    drop_flat(modules, clock)
    modules["peek"].weight = modules["head"].weight = modules["words"].weight

    def forward(there: Mapping[str, Tensor]) -> Mapping[str, Tensor]:
        for spec in model.layers:
            result = modules[spec.name](*(there[name] for name in spec.uses))
            there = {**there, **dict(zip(spec.gives, result if isinstance(result, tuple) else (result,), strict=True))}
        return {name: there[name] for name in ("scores", "extra")}

    return steps(forward, modules, clock, count, apart)


def steps(forward: Callable[[Mapping[str, Tensor]], Mapping[str, Tensor]], module: nn.Module, clock: DropoutClock,
          count: int, apart: int = 0) -> Reference:
    """Train so many steps by torch alone, and evaluate. Returns losses, norms and parameters.

    Args:
        apart: distance of the positions at which two steps begin.
    """
    losses, norms, parameters = by_torch(lambda batch: objective(forward(batch), batch), dict(module.named_parameters()), clock,
                                         [data(step) for step in range(count)], apart)
    module.eval()
    loss, labels = objective(forward(data(count)), data(count))
    return [*losses, loss.item() / int(labels)], norms, parameters


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


def lay(tensor: int = 1, pipeline: int = 1, data: int = 1, microbatches: int = 2, layers: Sequence[int] = (),
        **more: Any) -> Layout:
    degrees = Degrees(tensor=tensor, pipeline=pipeline, data=data)
    zero = more.get("zero", 0)
    return Layout(degrees=degrees, samples=SAMPLES // data // microbatches, sequence=LENGTH, microbatches=microbatches,
                  layers=tuple(layers) or (len(LAYERS),), ranks_per_node=8,
                  **({"zero": 0, "shard_degree": data if zero else 1, "precision": "fp64"} | more))


def scheduled(three: Sequence[int], four: Sequence[int]) -> dict[str, Layout]:
    """Return all schedules with every ZeRO stage, and each of either with every recomputation. ``three``, ``four``: layers of so
    many stages."""
    layouts = {}
    for (number, schedule), zero in product(enumerate(STAGES_PER_RANK), range(4)):
        recompute = ("none", "full", "every-2")[(number + zero) % 3]
        several = STAGES_PER_RANK[schedule] != 1
        layouts[f"{schedule} zero{zero} {recompute}"] = lay(
            pipeline=2 if several else 3, data=2, microbatches=4, layers=four if several else three, schedule=schedule,
            virtual_stages=2 if several else 1, zero=zero, reduce="microbatch" if zero >= 2 else "step", recompute=recompute)
    return layouts


LAYOUTS = {
    "one": lay(),
    "tp2": lay(2),
    "tp4, uneven": lay(4),
    "pp2": lay(pipeline=2, layers=(3, 4)),
    "pp4 1f1b": lay(pipeline=4, layers=(1, 2, 2, 2), microbatches=4),
    "pp2 zero_bubble": lay(pipeline=2, layers=(2, 5), schedule="zero_bubble"),
    "pp2 interleaved_1f1b": lay(pipeline=2, layers=(1, 2, 2, 2), schedule="interleaved_1f1b", virtual_stages=2),
    "pp2 zero_bubble_v": lay(pipeline=2, layers=(2, 2, 2, 1), schedule="zero_bubble_v", microbatches=4),
    "pp2 gpipe": lay(pipeline=2, layers=(6, 1), schedule="gpipe"),
    "dp2 zero1": lay(data=2, zero=1),
    "dp2 zero2": lay(data=2, zero=2, reduce="microbatch"),
    "dp4 zero3": lay(data=4, zero=3, microbatches=1),
    "recompute": lay(pipeline=2, layers=(3, 4), recompute="full"),
    "recompute every-2, zero3": lay(data=2, zero=3, recompute="every-2"),
    "tp2 pp2 dp2 zero2": lay(2, 2, 2, layers=(4, 3), zero=2, reduce="microbatch"),
    "activations away": lay(pipeline=4, layers=(1, 2, 2, 2), microbatches=4, offload=("activations",), offload_horizon=1),
    "parameters and optimizer away": lay(data=2, zero=3, offload=("parameters", "optimizer")),
    **scheduled((2, 3, 2), (1, 2, 2, 2)),
}
QUICK = ("pp2 zero_bubble_v", "recompute every-2, zero3", "tp2 pp2 dp2 zero2")


def distance(layout: Layout, before: Callable[[], None] = lambda: None, make: Callable[[int], ListedModel] = listed,
             reference: Callable[[], Reference] = plain) -> float:
    """Return the largest difference of any loss, norm or parameter from plain torch."""
    def rank() -> Report:
        before()
        return trained(layout, make)

    return apart(run_ranks(layout.ranks, rank), reference)


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


SKIPS = ("skip", "part1.getitem_3")  # of the list, and of the module with cut points


def no_sum_over_ties() -> None:
    units = ListedModel.units

    def alone(self: ListedModel, *given: Any) -> Any:
        return {name: replace(unit, tie=unit.tie and replace(unit.tie, stages=unit.tie.stages[:1]))
                for name, unit in units(self, *given).items()}

    setattr(ListedModel, "units", alone)  # noqa: B010


def no_gradient_of_the_skip() -> None:
    received = ListedModel.received

    def fewer(self: ListedModel, *given: Any) -> Any:
        return {name: replace(tensor, differentiable=tensor.differentiable and name not in SKIPS)
                for name, tensor in received(self, *given).items()}

    setattr(ListedModel, "received", fewer)  # noqa: B010
