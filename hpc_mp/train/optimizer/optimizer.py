"""The optimizer step over flat parts, and the gradient norm over all axes."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from itertools import groupby
from typing import Any, Literal, Protocol, TypeVar, cast

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box, FlatLayout, Piece
from hpc_mp.layout.learning_rate import RateSettings
from hpc_mp.layout.models import Weight
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS, has_no_decay
from hpc_mp.layout.owners import owned_elements
from hpc_mp.train.optimizer.optimizer_state import MASTER, HomeMaker, OnDevice, StateShape, Stretch, Turn
from hpc_mp.train.optimizer.whole_weights import WholeWeights
from hpc_mp.train.parallel.data_axis import TrainedUnit
from hpc_mp.train.parallel.groups import Axis


class OptimizerSettings(RateSettings, Protocol):
    """The optimizer's settings; the job file's ``[train]`` table has these fields."""

    optimizer: Literal["adamw", "sgd", "muon", "adafactor"]
    betas: tuple[float, float]
    eps: float
    weight_decay: float
    no_decay: tuple[str, ...]
    lr_factors: dict[str, float]
    momentum: float
    muon_momentum: float
    clip: float


ALONE = Axis()
Kind = TypeVar("Kind")
ADAMW = ("exp_avg", "exp_avg_sq")
SLOTS = {"adamw": ADAMW, "muon": ADAMW, "sgd": ("momentum_buffer",), "adafactor": ()}  # of weights without an owner
NORM_ROW = 1 << 14  # elements whose squares are summed in the format of the gradients


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of a parameter, or of its optimizer state, as this rank holds it."""

    key: str  # the parameter's Hugging Face name; for optimizer state optimizer.SLOT.NAME
    shape: tuple[int, ...]  # shape of the whole parameter
    box: Box
    values: Tensor
    saved: bool  # True if this rank or a replica saves the rectangle; another tensor rank or stage may hold a copy of it
    replicas: Axis  # the ranks that hold the same rectangle. of_experts: True if they are those of shared experts' state.
    of_experts: bool
    # called with a part of values after it was read or filled, so that state on a disk need not stay in memory
    release: Callable[[Tensor], None] = lambda values: None


class Optimizer:
    """torch's AdamW or SGD over this rank's part of every unit. Parameters that ``no_decay`` names have no weight decay, those
    that ``lr_factors`` names another learning rate. Muon and Adafactor update weights that have an owner as a whole; Muon leaves
    all others to AdamW.

    Args:
        tensor: the tensor axis.
        layouts: the rank's units on each tensor rank, for weights with owners.
        shapes: of the modules' parameters; missing ones have the engine's.
        dtype, device: format and device of masters and gradients.
        home: makes the home of the state between two steps.

    Attributes:
        slots: names of the state's slots; each slot has one number per element of a parameter.
    """

    def __init__(self, units: Mapping[str, TrainedUnit], settings: OptimizerSettings, dtype: torch.dtype, device: torch.device,
                 home: HomeMaker = OnDevice, tensor: Axis = ALONE, layouts: Sequence[Mapping[str, FlatLayout]] = (),
                 shapes: Mapping[str, tuple[int, ...]] | None = None) -> None:
        self.slots = SLOTS[settings.optimizer] if settings.optimizer != "sgd" or settings.momentum > 0 else ()
        self.units, self.settings = units, settings
        treatment = partial(_treatment, settings=settings, shapes=shapes or {})
        self.whole = WholeWeights(units, layouts, shapes or {}, settings, tensor, treatment) \
            if settings.optimizer in WHOLE_WEIGHTS else None
        owned = {} if self.whole is None else self.whole.owners
        self.wide = dtype == torch.float64  # the scale of torch's fused optimizers has only 32 bits
        self.gradients = [(unit.gradient.part[begin:end], float(counts and unit.gradient.replicate.rank == 0))
                          for unit in units.values() for begin, end, counts in _stretches(unit, lambda piece: piece.slot.counts)]
        self.weights = torch.tensor([weight for _, weight in self.gradients], dtype=torch.float64, device=device)
        stretches = [Stretch(name, begin, end, *treated, shift) for name, unit in units.items()
                     for (begin, end, treated), shift in _without_owner(unit, owned, treatment)]
        shape = StateShape({name: unit.layout.part - owned_elements(unit.layout, unit.shard.rank, owned)
                            for name, unit in units.items()}, self.slots, dtype)
        masters = {name: unit.away for name, unit in units.items() if unit.away is not None}
        self.home = (home if units else OnDevice)(shape, stretches, device, masters)  # nothing to move: a stage without adapters
        self.turns = [self._torch(turn) for turn in self.home.turns]

    def _torch(self, turn: Turn) -> torch.optim.Optimizer:
        """Return torch's optimizer for the stretches of one turn."""
        settings, adamw = self.settings, self.settings.optimizer != "sgd"
        groups: dict[tuple[bool, float], list[Tensor]] = {(False, 1.0): []}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for stretch, slots in turn:
            unit, own = self.units[stretch.unit], dict(slots)
            part = own.pop(MASTER, unit.master[stretch.begin:stretch.end])
            part.grad = unit.gradient.part[stretch.begin:stretch.end]
            groups.setdefault((stretch.spared, stretch.factor), []).append(part)
            state[part] = own | ({"step": torch.zeros((), dtype=torch.float32, device=part.device)} if adamw else {})
        params = [{"params": parts, "weight_decay": 0.0 if spared else settings.weight_decay, "factor": factor}
                  for (spared, factor), parts in groups.items()]
        rate = settings.learning_rate
        optimizer = (torch.optim.AdamW(params, lr=rate, betas=settings.betas, eps=settings.eps, fused=True) if adamw else
                     torch.optim.SGD(params, lr=rate, momentum=settings.momentum, fused=True))
        optimizer.state.update(state)
        return optimizer

    def held(self) -> Iterator[Held]:
        """Yield the rectangles of this rank's parts, of parameters and of their optimizer state."""
        state = self.home.arrays()
        for name, unit in self.units.items():
            shift = 0  # elements before a piece that have an owner, and so no state here
            for piece in unit.layout.pieces(unit.shard.rank):
                arrays = {f"optimizer.{slot}.": (values, piece.begin - shift) for slot, values in state[name].items()}
                if self.whole is not None and piece.slot.weight.name in self.whole.owners:
                    arrays, shift = {}, shift + piece.size
                for prefix, (values, begin) in ({"": (unit.master, piece.begin)} | arrays).items():
                    release = {"release": self.home.release} if prefix else {}
                    yield Held(prefix + piece.slot.weight.name, piece.slot.weight.shape, piece.box,
                               values[begin:begin + piece.size].view(piece.shape), piece.slot.counts,
                               unit.gradient.replicate, unit.layout.of_experts, **release)
        for owned in () if self.whole is None else self.whole.mine.values():
            unit = self.units[owned.unit]
            for slot, values in owned.state.items():
                yield Held(f"optimizer.{slot}.{owned.slot.weight.name}", tuple(values.shape),
                           tuple(slice(0, size) for size in values.shape), values,
                           unit.layout.tie is None or unit.layout.tie.counts, unit.gradient.replicate, unit.layout.of_experts)

    def squared_norm(self) -> Tensor:
        """Return this rank's share of the squared L2 norm of all gradients, a float64 scalar; the sum over ranks is the whole.
        Gradients that another rank counts have weight 0, so that the share is not finite if one of them is not."""
        if not self.gradients:
            return torch.zeros((), dtype=torch.float64, device=self.weights.device)
        return (torch.stack([_squared_norm(part) for part, _ in self.gradients]) * self.weights).sum()

    @torch.no_grad()
    def step(self, rate: float, norm: Tensor, divisor: Tensor) -> None:
        """Update the parameters with gradients clipped to the norm ``clip`` (torch's ``clip_grad_norm_`` formula). Nothing
        changes if the norm is not finite. The host does not wait for the device, unless weights are updated as a whole. ``rate``:
        learning rate. ``norm``: L2 norm of all gradients, a float64 scalar. ``divisor``: number by which gradients are divided, a
        float64 scalar."""
        clip, finite = self.settings.clip, norm.isfinite()
        scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
        if self.wide or self.whole is not None:
            for unit in self.units.values():
                unit.gradient.part.div_(scale * divisor)
            scale = divisor = torch.ones_like(norm)
        # torch's fused optimizers divide gradients by ``grad_scale`` and skip the update where ``found_inf`` is 1.
        grad_scale, found_inf = torch.where(finite, scale * divisor, 1.0).to(torch.float32), (~finite).to(torch.float32)
        for turn in self.turns:
            kernels = cast(Any, turn)
            kernels.grad_scale, kernels.found_inf = grad_scale, found_inf
            for group in turn.param_groups:
                group["lr"] = rate * group["factor"]
        if self.slots or self.whole is None:
            self.home.each(lambda turn: self.turns[turn].step())
        if self.whole is not None and bool(finite):
            self.whole.step(rate)

    def set_steps(self, number: int) -> None:
        """Set the number of updates of a loaded state, for AdamW's bias correction."""
        if self.whole is not None:
            self.whole.set_steps(number)
        for turn in self.turns:
            for slices in turn.state.values():
                if "step" in slices:
                    slices["step"].fill_(number)


def _squared_norm(part: Tensor) -> Tensor:
    """Return the squared norm of (length,), a float64 scalar, without a copy of the part in fp64. Sums over rows have a relative
    error of 4e-8 in fp32; one sum over millions of squares would have 1e-4."""
    rows = part.numel() // NORM_ROW
    whole, rest = part[:rows * NORM_ROW].view(rows, NORM_ROW), part[rows * NORM_ROW:]
    norms = torch.cat((torch.linalg.vector_norm(whole, dim=1), torch.linalg.vector_norm(rest).view(1)))
    return norms.double().square().sum()


def _treatment(weight: Weight, settings: OptimizerSettings, shapes: Mapping[str, tuple[int, ...]]) -> tuple[bool, float]:
    """Return whether a parameter has no weight decay, and the factor of its learning rate: that of the first matching pattern."""
    spared = has_no_decay(weight.name, shapes.get(weight.name, weight.shape), settings.no_decay)
    return spared, next((factor for pattern, factor in settings.lr_factors.items() if fnmatchcase(weight.name, pattern)), 1.0)


def _without_owner(unit: TrainedUnit, owned: Mapping[str, int], treatment: Callable[[Weight], tuple[bool, float]],
                   ) -> Iterator[tuple[tuple[int, int, tuple[bool, float]], int]]:
    """Yield the stretches of a rank's part that have no owner, with the number of elements before them that have one."""
    shift = 0
    for begin, end, (has_owner, treated) in _stretches(unit, lambda piece: (
            piece.slot.weight.name in owned, treatment(piece.slot.weight))):
        if has_owner:
            shift += end - begin
        else:
            yield (begin, end, treated), shift


def _stretches(unit: TrainedUnit, kind: Callable[[Piece], Kind]) -> Iterator[tuple[int, int, Kind]]:
    """Yield (begin, end, kind) of the stretches of a rank's part with parameters of one kind."""
    for now, run in groupby(unit.layout.pieces(unit.shard.rank), kind):
        pieces = list(run)
        yield pieces[0].begin, pieces[-1].begin + pieces[-1].size, now
