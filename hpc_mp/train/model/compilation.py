"""Blocks compiled by torch.compile, which fuses the elementwise kernels between two products.

The engine's own modules stay outside of the graphs: projections, whose weight gradients are deferred, experts, whose rows are
counted on the host, and the keys of dropout. A graph is compiled once for all equal layers, at the first step.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.experts import Experts
from hpc_mp.train.parallel.projection import Projection

Function = Callable[..., Any]


def compile_block(block: nn.Module) -> None:
    """Compile a block at its first call, except the engine's own modules in it."""
    for module in block.modules():
        if isinstance(module, Projection | Experts | HashDropout):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    block.compile(dynamic=False)


def compiled(function: Function) -> Function:
    """Compile a function of tensors for each shape of its arguments."""
    return torch.compile(function, dynamic=False)


def as_it_is(function: Function) -> Function:
    """Return a function without compilation."""
    return function
