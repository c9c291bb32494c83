"""The engine's attention functions in transformers' table, where the blocks of a model look them up by name.

Fused attention has no array of sequence x sequence, neither of scores nor of masks. With documents or windows it is a kernel for
sequences of several lengths on a GPU (see ``flash``). Where there is none for the format or the head's size, masks are
made for a block of queries at a time, and again in the backward.
"""

from types import SimpleNamespace
from typing import Any, cast

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.modeling_utils import ALL_ATTENTION_FUNCTIONS

from hpc_mp.train.model.recompute import computed_again
from hpc_mp.train.parallel import flash
from hpc_mp.train.parallel.context import CONTEXT, AttentionFunction, AttentionResult, context_attention
from hpc_mp.train.parallel.dropout import ATTENTION, HashDropout, attention
from hpc_mp.train.parallel.masks import Visible

FUSED = "hpc_mp_fused"  # a name for which transformers makes no masks
BIASED = "hpc_mp_biased"  # of models whose scores have a bias
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


def _fused(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Visible | None,
           s_aux: Tensor | None = None, **settings: Any) -> AttentionResult:
    """Attend by torch's fused kernels.

    Args:
        query, key, value: (batch, heads, sequence, head_dim); the heads of keys and values divide those of queries.
        attention_mask: what tokens see; None: all tokens before them, or all.
        s_aux: score of a further key of each head, the sink, whose value is 0, (heads,).
    """
    tensors = module, query, key, value
    if s_aux is not None:
        return _with_sinks(*tensors, attention_mask, s_aux, **settings)
    return (SDPA(*tensors, None, **settings) if attention_mask is None else _of_visible(*tensors, attention_mask, **settings))


@torch.compiler.disable
def _of_visible(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, visible: Visible,
                **settings: Any) -> AttentionResult:
    if flash.computes_documents(query):
        return flash.of_documents(query, key, value, visible, settings.get("scaling")), None

    def compute(query: Tensor, key: Tensor, value: Tensor, queries: slice, keys: slice) -> Tensor:
        return SDPA(module, query, key, value, visible.mask(query.dtype, queries, keys), **settings)[0]

    blocks = list(visible.blocks())
    if len(blocks) == 1:
        return SDPA(module, query, key, value, visible.whole(query.dtype), **settings)
    parts = ((query[:, :, queries], key[:, :, keys], value[:, :, keys], queries, keys) for queries, keys in blocks)
    return torch.cat([computed_again(compute, *part) for part in parts], 1), None


@torch.compiler.disable
def _with_sinks(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, visible: Visible | None, sinks: Tensor,
                **settings: Any) -> AttentionResult:
    """Attend to one more key, whose mask is the score of the sink: the product with a key of zeros adds nothing."""
    if visible is None:
        visible = Visible(torch.zeros(1, query.shape[2], dtype=torch.long, device=query.device), query.new_empty(0), None, True)

    def compute(query: Tensor, key: Tensor, value: Tensor, sinks: Tensor, queries: slice, keys: slice) -> Tensor:
        mask = visible.mask(query.dtype, queries, keys).expand(-1, len(sinks), -1, -1)
        column = sinks.to(mask.dtype).view(1, -1, 1, 1).expand(len(mask), -1, mask.shape[2], 1)
        key, value = (F.pad(states, (0, 0, 0, 1)) for states in (key, value))
        return SDPA(module, query, key, value, torch.cat((mask, column), 3), **settings)[0]

    parts = ((query[:, :, queries], key[:, :, keys], value[:, :, keys], sinks, queries, keys)
             for queries, keys in visible.blocks())
    return torch.cat([computed_again(compute, *part) for part in parts], 1), None


def _biased(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: None, scaling: float,
            position_bias: Tensor, **_: Any) -> AttentionResult:
    """Attend with scores to which a bias is added, which also hides tokens. It has the shape of scores, or 1 for any number."""
    if cast(HashDropout, module.attention_site).p:
        return attention(module, query, key, value, cast(Visible, SimpleNamespace(mask=lambda _: position_bias)), scaling)
    return SDPA(module, query, key, value, position_bias, scaling=scaling)


def _recomputed(function: AttentionFunction) -> AttentionFunction:
    def recomputed(module: nn.Module, *tensors: Tensor | Visible | None, **settings: Any) -> tuple[Tensor, None]:
        """Attend. ``tensors``: query, key, value and what tokens see."""
        return computed_again(lambda *tensors: function(module, *tensors, **settings)[0], *tensors), None

    return recomputed


SDPA = attention_function("sdpa")
FUNCTIONS: dict[str, AttentionFunction] = {FUSED: _fused, ATTENTION: attention}
FUNCTIONS |= {f"{RECOMPUTED}{name}": _recomputed(function) for name, function in FUNCTIONS.items()}
FUNCTIONS |= {CONTEXT: context_attention, BIASED: _biased}
for name, function in FUNCTIONS.items():
    AttentionInterface.register(name, function)
