"""The torch half of each family beside its table: how tokens become hidden states, what every block gets besides them, and what
a block must know when its projections are cut."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol

import torch
from torch import Tensor, nn

from hpc_mp.layout.models import FAMILIES, Family, ModelShape
from hpc_mp.train.engine.context import ContextAxis
from hpc_mp.train.engine.masks import added_mask, first_seen, restarted
from hpc_mp.train.engine.projection import TensorAxis

if TYPE_CHECKING:
    from transformers import PreTrainedConfig


class Surroundings(Protocol):
    """What a family's functions see of the stage that they work for.

    Attributes:
        positions: of the tokens that attention sees, in their sample, (sequence,).
        context_axis: which of a sample's tokens these are.
    """

    config: "PreTrainedConfig"
    family: Family
    shape: ModelShape
    tensor: TensorAxis
    positions: Tensor
    context_axis: ContextAxis

    @property
    def rotary(self) -> nn.Module | None: ...

    def get_submodule(self, target: str) -> nn.Module: ...


@dataclass(frozen=True, slots=True)
class TorchHalf:
    """Functions of a family. ``begins`` tells two of them where documents begin, see ``masks``.

    Attributes:
        embed: ids (batch, sequence) -> hidden states (batch, sequence, hidden).
        context: keyword arguments of every block, given hidden states for their format and device.
        patch: after the projections of a block were replaced, where its attention is cut.
        buffers: values of a block's buffers, by name inside a block; those that transformers makes on meta have none.
    """

    embed: Callable[[Surroundings, Tensor, Tensor | None], Tensor]
    context: Callable[[Surroundings, Tensor, Tensor | None], dict[str, Any]]
    patch: Callable[[Surroundings, nn.Module], None] = lambda stage, block: None
    buffers: Callable[[Surroundings], dict[str, Tensor]] = lambda stage: {}


def _rows(stage: Surroundings, ids: Tensor, begins: Tensor | None) -> Tensor:
    hidden: Tensor = stage.get_submodule(stage.family.embedding)(ids)
    return hidden


def _dropped_rows(stage: Surroundings, ids: Tensor, begins: Tensor | None) -> Tensor:
    assert stage.family.embedding_dropout is not None
    dropped: Tensor = stage.get_submodule(stage.family.embedding_dropout)(_rows(stage, ids, begins))
    return dropped


def _rows_and_positions(stage: Surroundings, ids: Tensor, begins: Tensor | None) -> Tensor:
    assert stage.family.position is not None and stage.family.embedding_dropout is not None
    positions = stage.tensor.share(restarted(stage.positions, begins), 1)
    hidden = _rows(stage, ids, begins) + stage.get_submodule(stage.family.position)(positions)
    dropped: Tensor = stage.get_submodule(stage.family.embedding_dropout)(hidden)
    return dropped


def _masked(stage: Surroundings, hidden: Tensor, begins: Tensor | None) -> dict[str, Any]:
    """Attention is causal by itself when it gets no mask."""
    first = first_seen(begins, stage.shape.window, stage.positions)
    return {"attention_mask": None if first is None else stage.context_axis.mask(first, hidden.dtype)}


def _behind_the_last(places: Tensor, length: int) -> Tensor:
    """Places with the last one of a whole sample before them. transformers chooses rotary frequencies by the largest position
    that it gets (longrope, dynamic), and ranks, microbatches and documents have their own: so all use the same."""
    return torch.cat((places.new_full((len(places), 1), length - 1), places), 1)


def _rotary(stage: Surroundings, hidden: Tensor, begins: Tensor | None) -> dict[str, Any]:
    assert stage.rotary is not None
    places = _behind_the_last(restarted(stage.positions, begins), stage.context_axis.sequence)
    tables = tuple(table[:, 1:].contiguous() for table in stage.rotary.to(hidden.device)(hidden, places))
    return {**_masked(stage, hidden, begins), "position_embeddings": tables}


def _masked_positions(stage: Surroundings, hidden: Tensor, begins: Tensor | None) -> dict[str, Any]:
    """For attention that always needs a mask, and looks its positions up."""
    first = torch.zeros_like(stage.positions).unsqueeze(0) if begins is None else begins
    return {"attention_mask": added_mask(first, hidden.dtype), "position_ids": restarted(stage.positions, begins)}


def _sines_and_cosines(stage: Surroundings) -> dict[str, Tensor]:
    """One table for all blocks. Of transformers' families each rank imports its own."""
    from transformers.models.gptj.modeling_gptj import create_sinusoidal_positions

    table = create_sinusoidal_positions(stage.shape.positions, stage.config.rotary_dim)
    return {"attn.embed_positions": table.to(stage.positions.device)}


def _split_fused(stage: Surroundings, block: nn.Module) -> None:
    """q, k and v come side by side, each as wide as this rank's heads."""
    setattr(block.get_submodule("attn"), "split_size", stage.shape.hidden // stage.tensor.size)  # noqa: B010


def _grouped(stage: Surroundings, block: nn.Module) -> None:
    """This rank's query heads share this rank's key-value heads."""
    groups = stage.shape.heads // max(stage.tensor.size, stage.shape.kv_heads)
    setattr(block.get_submodule("self_attn"), "num_key_value_groups", groups)  # noqa: B010


def _fewer_heads(stage: Surroundings, block: nn.Module) -> None:
    """This rank's heads alone are split and merged."""
    setattr(block.get_submodule("attn"), "num_attention_heads", stage.shape.heads // stage.tensor.size)  # noqa: B010


LLAMA = TorchHalf(_rows, _rotary, _grouped)
HALVES: Mapping[str, TorchHalf] = {
    "gptj": (TorchHalf(_dropped_rows, _masked_positions, _fewer_heads, _sines_and_cosines) if FAMILIES["gptj"].own_attention
             else TorchHalf(_dropped_rows, _rotary)),
    "mixtral": LLAMA,
    "gpt2": TorchHalf(_rows_and_positions, _masked, _split_fused),
    "llama": LLAMA,
    "qwen2": LLAMA,
}

