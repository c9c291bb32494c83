"""The optimizer step over local tensors, the gradient norm over all axes, and the learning rate."""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Literal, Protocol

import torch
from torch import Tensor
from torch.distributed.tensor import DTensor

from hpc_mp.train.engine.stage import Stage


class OptimizerSettings(Protocol):
    """The optimizer's settings; the job file's ``[train]`` table has these fields."""

    @property
    def optimizer(self) -> Literal["adamw", "sgd"]: ...
    @property
    def learning_rate(self) -> float: ...
    @property
    def lr_schedule(self) -> str: ...
    @property
    def warmup_steps(self) -> int: ...
    @property
    def steps(self) -> int: ...
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


@dataclass(frozen=True, slots=True)
class Held:
    """One parameter as this rank holds it.

    Attributes:
        saved: whether this rank and its replicas have the part that is saved: another tensor rank or stage may hold it too.
        counted: whether its local part enters the gradient norm here: it is saved, and this is the first replica.
    """

    name: str
    parameter: Tensor
    state: dict[str, Tensor]  # optimizer slot -> tensor laid out like the parameter
    saved: bool
    counted: bool


class Optimizer:
    """torch's AdamW or SGD over the local parts. Parameters that ``no_decay`` names have no weight decay.

    A rank whose part of everything is empty, because there are more ranks than rows, has nothing to update.
    """

    def __init__(self, stage: Stage, settings: OptimizerSettings, first_replica: bool) -> None:
        slots = SLOTS[settings.optimizer] if settings.optimizer == "adamw" or settings.momentum > 0 else ()
        self.settings = settings
        self.held = [
            Held(name, parameter, {slot: torch.zeros_like(parameter, requires_grad=False) for slot in slots},
                 _saved(stage, name), first_replica and _saved(stage, name))
            for name, parameter in stage.named_parameters()
        ]
        self.locals = [_part(held.parameter) for held in self.held]
        filled = [(held, part) for held, part in zip(self.held, self.locals, strict=True) if part.numel()]
        spared = [part for held, part in filled if _matches(held.name, settings.no_decay)]
        decaying = [part for held, part in filled if not _matches(held.name, settings.no_decay)]
        groups = [{"params": decaying, "weight_decay": settings.weight_decay}, {"params": spared, "weight_decay": 0.0}]
        if settings.optimizer == "adamw":
            self.torch: torch.optim.Optimizer = torch.optim.AdamW(
                groups, lr=settings.learning_rate, betas=settings.betas, eps=settings.eps, fused=True)
        else:
            self.torch = torch.optim.SGD(groups, lr=settings.learning_rate, momentum=settings.momentum)
        for held, part in filled:
            self.torch.state[part] = {slot: _part(tensor) for slot, tensor in held.state.items()}
            if settings.optimizer == "adamw":
                self.torch.state[part]["step"] = torch.zeros((), dtype=torch.float32, device=part.device)
        self.parts = [part for _, part in filled]

    def squared_norm(self) -> Tensor:
        """This rank's share of the squared L2 norm of all gradients, a float64 scalar: summed over all ranks it is whole."""
        norms = [torch.linalg.vector_norm(_part(held.parameter.grad), dtype=torch.float64)
                 for held in self.held if held.counted and held.parameter.grad is not None]
        if not norms:
            return torch.zeros((), dtype=torch.float64, device=self.locals[0].device)
        return torch.stack(norms).square().sum()

    @torch.no_grad()
    def step(self, number: int, norm: float) -> None:
        """Update with the gradients, scaled so that their norm is at most ``clip`` (torch's ``clip_grad_norm_`` formula).

        Args:
            number: of the optimizer step, from 0.
            norm: L2 norm of all gradients.
        """
        scale = min(1.0, self.settings.clip / (norm + 1e-6)) if self.settings.clip > 0 else 1.0
        for held, part in zip(self.held, self.locals, strict=True):
            if part.numel():
                assert held.parameter.grad is not None
                part.grad = _part(held.parameter.grad)
                if scale != 1.0:
                    part.grad.mul_(scale)
        for group in self.torch.param_groups:
            group["lr"] = learning_rate(number, self.settings)
        self.torch.step()
        self.skip()

    def skip(self) -> None:
        """Drop the gradients of this step; nothing is updated."""
        for held, part in zip(self.held, self.locals, strict=True):
            held.parameter.grad = None
            part.grad = None

    def set_steps(self, number: int) -> None:
        """After loading a checkpoint: how many updates the state has behind it (for AdamW's bias correction)."""
        for part in self.parts:
            if "step" in self.torch.state[part]:
                self.torch.state[part]["step"].fill_(number)


def learning_rate(number: int, settings: OptimizerSettings) -> float:
    """The rate of optimizer step ``number`` (from 0): linear warm-up over ``warmup_steps`` that ends at the full rate,
    then constant, or down to zero at ``steps`` along a line or half a cosine (arXiv:1608.03983)."""
    if number < settings.warmup_steps:
        return settings.learning_rate * (number + 1) / settings.warmup_steps
    progress = (number - settings.warmup_steps) / max(1, settings.steps - settings.warmup_steps)
    falls = {"constant": 1.0, "linear": 1.0 - progress, "cosine": 0.5 * (1.0 + math.cos(math.pi * progress))}
    return settings.learning_rate * falls[settings.lr_schedule]


def _matches(name: str, patterns: Iterable[str]) -> bool:
    return any(fnmatchcase(name, pattern) for pattern in patterns)


def _part(tensor: Tensor) -> Tensor:
    """The local tensor itself (sharing memory), outside autograd."""
    with torch.no_grad():
        return (tensor.to_local() if isinstance(tensor, DTensor) else tensor).detach()


def _saved(stage: Stage, name: str) -> bool:
    """Cut parts are saved by every tensor rank, whole ones by the first; the head's copy of a tied weight never."""
    if name == stage.copied:
        return False
    return stage.weights[name].cut is not None or stage.tensor.rank == 0
