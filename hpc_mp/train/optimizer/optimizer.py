"""The optimizer step over flat parts, and the gradient norm over all axes."""

from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any, Literal, Protocol, cast

import torch
from torch import Tensor

from hpc_mp.layout.flat import Box, Piece
from hpc_mp.layout.learning_rate import RateSettings
from hpc_mp.train.optimizer.optimizer_state import MASTER, OnDevice, StateHome, StateShape, Stretch, Turn
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.host_parameters import HostParts


class OptimizerSettings(RateSettings, Protocol):
    """The optimizer's settings; the job file's ``[train]`` table has these fields."""

    @property
    def optimizer(self) -> Literal["adamw", "sgd"]: ...
    @property
    def betas(self) -> tuple[float, float]: ...
    @property
    def eps(self) -> float: ...
    @property
    def weight_decay(self) -> float: ...
    @property
    def no_decay(self) -> tuple[str, ...]: ...
    @property
    def momentum(self) -> float: ...
    @property
    def clip(self) -> float: ...


SLOTS = {"adamw": ("exp_avg", "exp_avg_sq"), "sgd": ("momentum_buffer",)}
NORM_ROW = 4096  # numbers whose squares are summed in the format of the gradients


@dataclass(frozen=True, slots=True)
class Held:
    """A rectangle of a parameter, or of its optimizer state, as this rank holds it.

    Attributes:
        key: the parameter's Hugging Face name; for optimizer state ``optimizer.SLOT.NAME``.
        shape: of the whole.
        saved: whether this rank and its replicas have the part that is saved: another tensor rank or stage may hold it too.
        replicas: the ranks that hold the same, and ``of_experts``: whether they are others than those of most state.
        release: to be called with a part of ``values`` that was read or filled: what lies on a disk need not stay in memory.
    """

    key: str
    shape: tuple[int, ...]
    box: Box
    values: Tensor
    saved: bool
    replicas: Axis
    of_experts: bool
    release: Callable[[Tensor], None]


class HomeMaker(Protocol):
    """Makes the home of optimizer state; ``masters``: those that lie in host memory."""

    def __call__(
        self, shape: StateShape, stretches: Iterable[Stretch], device: torch.device, *, masters: HostParts,
    ) -> StateHome: ...


class Optimizer:
    """torch's AdamW or SGD over this rank's part of every unit. Parameters that ``no_decay`` names have no weight decay.

    Args:
        dtype, device: of masters and gradients.
        home: makes the place where state lies between two steps.

    Attributes:
        slots: names of the numbers of state that each parameter has.
    """

    def __init__(self, units: Mapping[str, Unit], settings: OptimizerSettings, dtype: torch.dtype, device: torch.device,
                 home: HomeMaker = OnDevice) -> None:
        self.slots = SLOTS[settings.optimizer] if settings.optimizer == "adamw" or settings.momentum > 0 else ()
        self.units, self.settings = units, settings
        # The fused optimizers know a scale of 32 bits only.
        self.wide = dtype == torch.float64
        self.gradients = [(unit.gradient.part[begin:end], float(counts and unit.gradient.replicate.rank == 0))
                          for unit in units.values() for begin, end, counts in _stretches(unit, lambda piece: piece.slot.counts)]
        self.weights = torch.tensor([weight for _, weight in self.gradients], dtype=torch.float64, device=device)
        stretches = [Stretch(name, begin, end, spared) for name, unit in units.items() for begin, end, spared in _stretches(
            unit, lambda piece: _matches(piece.slot.weight.name, settings.no_decay))]
        shape = StateShape({name: unit.layout.part for name, unit in units.items()}, self.slots, dtype)
        masters = {name: unit.away for name, unit in units.items() if unit.away is not None}
        self.home = home(shape, stretches, device, masters=masters)
        self.turns = [self._torch(turn) for turn in self.home.turns]

    def _torch(self, turn: Turn) -> torch.optim.Optimizer:
        """Of what is updated at once."""
        settings = self.settings
        groups: dict[bool, list[Tensor]] = {False: [], True: []}
        state: dict[Tensor, dict[str, Tensor]] = {}
        for stretch, slots in turn:
            unit, kept = self.units[stretch.unit], dict(slots)
            part = kept.pop(MASTER, unit.master[stretch.begin:stretch.end])
            part.grad = unit.gradient.part[stretch.begin:stretch.end]
            groups[stretch.spared].append(part)
            state[part] = kept
            if settings.optimizer == "adamw":
                state[part]["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        given = [{"params": groups[False], "weight_decay": settings.weight_decay}, {"params": groups[True], "weight_decay": 0.0}]
        made: torch.optim.Optimizer
        if settings.optimizer == "adamw":
            made = torch.optim.AdamW(given, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
        else:
            made = torch.optim.SGD(given, lr=settings.learning_rate, momentum=settings.momentum, fused=True)
        made.state.update(state)
        return made

    def held(self) -> Iterator[Held]:
        """Every rectangle of this rank's parts: of the parameters, and of their optimizer state."""
        state = self.home.arrays()
        for name, unit in self.units.items():
            arrays = {"": unit.master} | {f"optimizer.{slot}.": values for slot, values in state[name].items()}
            for piece in unit.layout.pieces(unit.shard.rank):
                for prefix, values in arrays.items():
                    release = self.home.release if prefix else _stay
                    yield Held(prefix + piece.slot.weight.name, piece.slot.weight.shape, piece.box,
                               values[piece.begin:piece.begin + piece.size].view(piece.shape), piece.slot.counts,
                               unit.gradient.replicate, unit.layout.of_experts, release)

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared L2 norm of all gradients, a float64 scalar: summed over all ranks it is whole. What
        another rank counts is looked at too: where it is not finite, neither is the share."""
        if not self.gradients:
            return torch.zeros((), dtype=torch.float64, device=self.weights.device)
        return (torch.stack([_squared_norm(part) for part, _ in self.gradients]) * self.weights).sum()

    @torch.no_grad()
    def step(self, rate: float, norm: Tensor, divisor: Tensor) -> None:
        """Update with the gradients, scaled so that their norm is at most ``clip`` (torch's ``clip_grad_norm_`` formula); when
        the norm is not finite, nothing changes. The host waits for nothing.

        Args:
            rate: learning rate.
            norm: L2 norm of all gradients, a float64 scalar.
            divisor: factor by which gradients are too large, a float64 scalar.
        """
        clip, finite = self.settings.clip, norm.isfinite()
        scale = ((norm + 1e-6) / clip).clamp(min=1.0) if clip > 0 else torch.ones_like(norm)
        if self.wide:
            for unit in self.units.values():
                unit.gradient.part.div_(scale * divisor)
            scale = divisor = torch.ones_like(norm)
        # torch's fused optimizers divide gradients by ``grad_scale`` and skip the update where ``found_inf`` is 1.
        grad_scale, found_inf = torch.where(finite, scale * divisor, 1.0).to(torch.float32), (~finite).to(torch.float32)
        for turn in self.turns:
            kernels = cast(Any, turn)
            kernels.grad_scale, kernels.found_inf = grad_scale, found_inf
            for group in turn.param_groups:
                group["lr"] = rate
        self.home.each(lambda turn: self.turns[turn].step())

    def set_steps(self, number: int) -> None:
        """After loading a checkpoint: how many updates the state has behind it (for AdamW's bias correction)."""
        for turn in self.turns:
            for slices in turn.state.values():
                if "step" in slices:
                    slices["step"].fill_(number)


def _squared_norm(part: Tensor) -> Tensor:
    """A float64 scalar, of (length,). The sum of a row keeps the digits of the part's own format (1e-9 of the whole in fp32,
    where one sum over millions of squares keeps 1e-5), and no copy of the part in fp64 is made."""
    rows = part.numel() // NORM_ROW
    whole, rest = part[:rows * NORM_ROW].view(rows, NORM_ROW), part[rows * NORM_ROW:]
    norms = torch.cat((torch.linalg.vector_norm(whole, dim=1), torch.linalg.vector_norm(rest).view(1)))
    return norms.double().square().sum()


def _stretches(unit: Unit, kind: Callable[[Piece], bool]) -> Iterator[tuple[int, int, bool]]:
    """(begin, end, kind) of the stretches of a rank's part whose parameters are of one kind."""
    begin = end = 0
    last = False
    for piece in unit.layout.pieces(unit.shard.rank):
        if (now := kind(piece)) != last:
            if end > begin:
                yield begin, end, last
            begin, last = piece.begin, now
        end = piece.begin + piece.size
    if end > begin:
        yield begin, end, last


def _stay(values: Tensor) -> None:
    """Parameters are in memory all the time."""


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)
