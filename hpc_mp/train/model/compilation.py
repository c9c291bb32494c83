"""The compilation of a block, of Hugging Face's models and of lists of layers: what stays outside of its graphs."""

import torch
from torch import nn

from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.experts import Experts
from hpc_mp.train.parallel.projection import Projection


def compile_block(block: nn.Module) -> None:
    """Compile a block at its first call, so that elementwise kernels between two products are fused.

    The engine's own parts stay outside of the graphs: projections, whose weight gradients are deferred, experts, whose rows
    are counted on the host (their activation is a graph of its own, for any number of rows), the keys of dropout, and hooks,
    which send messages: each message changes numbers of the rank, for which torch would compile anew. A graph is compiled once
    for all equal layers, at the first step.
    """
    for module in block.modules():
        if isinstance(module, Projection | Experts | HashDropout):
            module.forward = torch.compiler.disable(module.forward)  # type: ignore[method-assign]
        if isinstance(module, Experts):
            module.gated = torch.compile(module.gated, dynamic=True)
        for hooks in (module._forward_pre_hooks, module._forward_hooks):
            hooks.update({key: torch.compiler.disable(hook) for key, hook in hooks.items()})
    block.compile(dynamic=False)
