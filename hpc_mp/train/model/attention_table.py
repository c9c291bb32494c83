"""The engine's attention functions in transformers' table, where the blocks of a model look them up by name."""

from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpc_mp.train.model.recompute import computed_again
from hpc_mp.train.parallel.context import CONTEXT, AttentionFunction, context_attention
from hpc_mp.train.parallel.dropout import ATTENTION, attention

FUSED = "hpc_mp_fused"  # torch's fused attention, under a name for which transformers makes no masks
RECOMPUTED = "hpc_mp_recomputed_"  # prefix of the variant of a function that the backward recomputes


def attention_name(own: bool, recompute: str) -> str:
    """Return the name of the attention function for a model's blocks.

    Args:
        own: True if torch's fused attention cannot be used, because weights are dropped or scores have a cap.
    """
    return f"{RECOMPUTED if recompute == 'selective' else ''}{ATTENTION if own else FUSED}"


def attention_function(name: str) -> AttentionFunction:
    """Return the function with this name."""
    return cast(AttentionFunction, ALL_ATTENTION_FUNCTIONS[name])


def _recomputed(function: AttentionFunction) -> AttentionFunction:
    def recomputed(module: nn.Module, *tensors: Tensor | None, **settings: Any) -> tuple[Tensor, None]:
        """Attend. ``tensors``: query, key, value and mask."""
        return computed_again(lambda *tensors: function(module, *tensors, **settings)[0], *tensors), None

    return recomputed


FUNCTIONS: dict[str, AttentionFunction] = {FUSED: attention_function("sdpa"), ATTENTION: attention}
FUNCTIONS |= {f"{RECOMPUTED}{name}": _recomputed(function) for name, function in FUNCTIONS.items()} | {CONTEXT: context_attention}
for name, function in FUNCTIONS.items():
    AttentionInterface.register(name, function)
