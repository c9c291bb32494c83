"""The engine's attention functions in transformers' table, where the blocks of a model look them up by name."""

from typing import Any, cast

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpc_mp.train.model.recompute import FUSED, computed_again, recomputed_name
from hpc_mp.train.parallel.context import CONTEXT, AttentionFunction, context_attention
from hpc_mp.train.parallel.dropout import ATTENTION, attention


def attention_function(name: str) -> AttentionFunction:
    """Return the function with this name."""
    return cast(AttentionFunction, ALL_ATTENTION_FUNCTIONS[name])


def _recomputed(name: str) -> AttentionFunction:
    """Return the function with this name, wrapped so that the backward recomputes it."""

    def recomputed(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None,
                   **settings: Any) -> tuple[Tensor, None]:
        def core(query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None) -> Tensor:
            return attention_function(name)(module, query, key, value, attention_mask, **settings)[0]

        return computed_again(core, query, key, value, attention_mask), None

    return recomputed


RECOMPUTED = {recomputed_name(name): _recomputed(name) for name in (ATTENTION, FUSED)}
OURS: dict[str, AttentionFunction] = {
    FUSED: attention_function("sdpa"), CONTEXT: context_attention, ATTENTION: attention, **RECOMPUTED}

for name, function in OURS.items():
    AttentionInterface.register(name, function)
