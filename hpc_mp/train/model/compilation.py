"""Blocks compiled by torch.compile, which fuses the elementwise kernels between two products.

The engine's own modules stay outside of the graphs: projections, whose weight gradients are deferred, experts, whose rows are
counted on the host, and the keys of dropout. A graph is compiled once for all equal layers, at the first step.
"""

import torch
from torch import nn

from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.experts import Experts
from hpc_mp.train.parallel.projection import Projection


def compile_block(block: nn.Module) -> None:
    """Compile a block at its first call, except the engine's own modules in it."""
    for module in block.modules():
        if isinstance(module, Projection | Experts | HashDropout):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
    block.compile(dynamic=False)
