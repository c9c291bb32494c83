"""Blocks compiled by torch.compile: elementwise kernels between two products become one.

What the engine does itself stays outside of the graphs: projections, whose weight gradients wait in a queue, experts, whose rows
are counted on the host, and the keys of dropout. A graph is compiled once for all layers alike, at the first step.
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
    """Have a block compiled at its first call, but for the modules of the engine inside."""
    for module in block.modules():
        if isinstance(module, Projection | Experts | HashDropout):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    block.compile(dynamic=False)


def compiled(function: Function) -> Function:
    """A function of tensors, compiled for each of the shapes that it is given."""
    return torch.compile(function, dynamic=False)


def as_it_is(function: Function) -> Function:
    """Nothing is compiled."""
    return function
