"""Small models that are not Hugging Face's, on forked ranks and in one process of plain torch.

They have a skip, two tensors between stages, a tied weight on three stages, a buffer, dropout, and an objective of two terms.
"""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from itertools import product
from pathlib import Path
from typing import Any, Literal

import torch
from beside import SAMPLES, SEED, STEPS, Reference, Report, apart, by_torch, drop_flat, engine_of, parts_at_end, share, stepped
from ranks import run_ranks
from torch import Tensor, nn

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.schedule.names import STAGES_PER_RANK
from hpc_mp.rundir import read_json
from hpc_mp.rundir.layout import COUNTERS
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.model.layer_list import LayerSpec
from hpc_mp.train.model.listed_stage import ListedModel
from hpc_mp.train.parallel.dropout import DropoutClock
from hpc_mp.train.pipeline.stage import Carried

WORDS, WIDTH, LENGTH = 23, 12, 5


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


def listed(samples: int, layers: Sequence[LayerSpec] = LAYERS) -> ListedModel:
    size = (samples, LENGTH)
    batch = {name: Carried(size, torch.int64, False) for name in ("ids", "input", "labels")}
    batch["weight"] = Carried(size, torch.float32, False)
    return ListedModel(tuple(layers), objective, SEED, ("scores", "extra"), batch)


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
