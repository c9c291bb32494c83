"""A pipeline stage: Hugging Face's own blocks on the meta device, their projections cut, driven by our own loop.

The module tree carries Hugging Face's names, so that ``named_parameters`` are the names of a Hugging Face checkpoint.
"""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import nullcontext
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, PreTrainedConfig

from hpc_mp.layout.models import Family, ModelShape, Weight
from hpc_mp.train.engine.dropout import ATTENTION, DropoutClock, HashDropout
from hpc_mp.train.engine.stays_double import StaysDouble
from hpc_mp.train.engine.tensor import (
    ColumnProjection,
    FusedProjection,
    RowProjection,
    TensorGroup,
    VocabularyEmbedding,
    local,
    project,
)


@dataclass(frozen=True, slots=True)
class StageSpan:
    """Which part of the model a stage is: global layer numbers, and whether it holds the embedding and the head."""

    layers: range
    first: bool
    last: bool


def hugging_face_config(config: Mapping[str, Any], family: Family, dropout: float | None) -> PreTrainedConfig:
    """The model's configuration; ``dropout`` overrides every probability. Attention weights that are dropped need our
    own attention function, all others use torch's fused one."""
    values = {key: value for key, value in config.items() if key not in ("model_type", "architectures")}
    if dropout is not None:
        values |= dict.fromkeys(family.dropouts, dropout)
    built = AutoConfig.for_model(family.model_type, **values)
    drops_attention = max(getattr(built, name) for name in family.dropouts if name.startswith("att")) > 0
    built._attn_implementation = ATTENTION if drops_attention else "sdpa"
    return built


class Stage(nn.Module):
    """One stage. ``forward`` takes token ids on the first stage and hidden states on the others; it returns hidden
    states, or on the last stage the summed cross entropy of the labels.

    Args:
        config: the model's configuration.
        family, shape: the family's table and the model's sizes.
        part: which layers, and whether embedding and head belong to it.
        tensor: the tensor axis.
        dtype: of the parameters (the masters).
        clock: tells dropout where training is.
    """

    def __init__(
        self, config: PreTrainedConfig, family: Family, shape: ModelShape, part: StageSpan, tensor: TensorGroup,
        dtype: torch.dtype, clock: DropoutClock,
    ) -> None:
        super().__init__()
        self.family, self.shape, self.part, self.tensor = family, shape, part, tensor
        self.weights: dict[str, Weight] = {w.name: w for w in family.stage_weights(shape, part.layers, part.first, part.last)}
        self._parameters_made = {
            name: tensor.parameter(w.shape, w.cut, dtype) for name, w in self.weights.items()
        }
        with torch.device("meta"):
            whole = AutoModelForCausalLM.from_config(config)
        self.computing = StaysDouble if dtype == torch.float64 else nullcontext
        with self.computing():
            self.rotary = None if family.rotary is None else _Rotary(type(whole.get_submodule(family.rotary)), config)

        if part.first or (part.last and shape.tied):
            padding = cast(nn.Embedding, whole.get_submodule(family.embedding)).padding_idx
            self._graft(family.embedding, VocabularyEmbedding(self._made(f"{family.embedding}.weight"), padding, tensor))
        if part.first and family.position is not None:
            self._graft(family.position, whole.get_submodule(family.position))
        if part.first and family.embedding_dropout is not None:
            self._graft(family.embedding_dropout, whole.get_submodule(family.embedding_dropout))
        for layer in part.layers:
            self._graft(f"{family.blocks}.{layer}", self._cut(whole.get_submodule(f"{family.blocks}.{layer}"), layer))
        if part.last:
            self._graft(family.norm, whole.get_submodule(family.norm))
            if not shape.tied:
                self._graft(family.head, _Holder(self._made(f"{family.head}.weight")))
        self._adopt_parameters()
        self._replace_dropout(clock)

    def forward(self, x: Tensor, labels: Tensor | None = None) -> Tensor:
        """x: ids (batch, sequence) or hidden states (batch, sequence, hidden); labels: (batch, sequence), already
        shifted, ``IGNORED`` where a token does not count."""
        with self.computing():
            return self._forward(x, labels)

    def _forward(self, x: Tensor, labels: Tensor | None) -> Tensor:
        hidden = self._embed(x) if self.part.first else x
        context = self._context(hidden)
        for block in self.blocks():
            hidden = block(hidden, **context)
        if not self.part.last:
            return hidden
        assert labels is not None
        hidden = self.tensor.enter(self.get_submodule(self.family.norm)(hidden))
        head = self.get_submodule(self.family.embedding if self.shape.tied else self.family.head)
        logits = project(hidden, local(cast(Tensor, head.weight)), None, transposed=False).flatten(0, 1)
        logits = logits.to(torch.promote_types(logits.dtype, torch.float32))
        return self.tensor.cross_entropy(logits, labels.flatten(), self.shape.vocabulary)

    def blocks(self) -> list[nn.Module]:
        return [self.get_submodule(f"{self.family.blocks}.{layer}") for layer in self.part.layers]

    @property
    def padding(self) -> dict[str, int]:
        """Embedding name -> its row that stays zero, where the family has one."""
        rows = {}
        for name, module in self.named_modules():
            if isinstance(module, VocabularyEmbedding) and module.padding is not None:
                rows[f"{name}.weight"] = module.padding
        return rows

    @property
    def copied(self) -> str | None:
        """The name of the tied weight when this stage holds the head's copy of it."""
        return f"{self.family.embedding}.weight" if self.part.last and self.shape.tied and not self.part.first else None

    @property
    def shares_tied_weight(self) -> bool:
        """Whether this stage's embedding weight lives on another stage too."""
        return self.shape.tied and self.part.first != self.part.last

    def _embed(self, ids: Tensor) -> Tensor:
        hidden = self.get_submodule(self.family.embedding)(ids)
        if self.family.position is not None:
            hidden = hidden + self.get_submodule(self.family.position)(torch.arange(ids.shape[1], device=ids.device))
        if self.family.embedding_dropout is not None:
            hidden = self.get_submodule(self.family.embedding_dropout)(hidden)
        return hidden

    def _context(self, hidden: Tensor) -> dict[str, Any]:
        """What every block gets besides the hidden states; attention is causal by itself when it gets no mask."""
        if self.rotary is None:
            return {"attention_mask": None}
        return {"attention_mask": None, "position_embeddings": self.rotary.table(hidden)}

    def _graft(self, path: str, module: nn.Module) -> None:
        """Attach a module under its Hugging Face path."""
        *parents, leaf = path.split(".")
        node: nn.Module = self
        for name in parents:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node.get_submodule(name)
        node.add_module(leaf, module)

    def _made(self, name: str) -> nn.Parameter:
        return self._parameters_made[name]

    def _cut(self, block: nn.Module, layer: int) -> nn.Module:
        """Replace a block's projections by cut ones, and let the gradient of shared inputs be summed."""
        for path, how in self.family.projections.items():
            prefix = f"{self.family.blocks}.{layer}.{path}"
            weight, bias = self._made(f"{prefix}.weight"), self._parameters_made.get(f"{prefix}.bias")
            parent, leaf = path.rsplit(".", 1)
            cut: nn.Module
            if how == "fused":
                assert bias is not None
                cut = FusedProjection(weight, bias)
                setattr(block.get_submodule(parent), "split_size", self.shape.hidden // self.tensor.size)  # noqa: B010
            elif how == "column":
                cut = ColumnProjection(weight, bias, self.family.transposed)
            else:
                cut = RowProjection(weight, bias, self.family.transposed, self.tensor)
            setattr(block.get_submodule(parent), leaf, cut)
        if self.tensor.size > 1:
            for path in self.family.enters:
                block.get_submodule(path).register_forward_pre_hook(self._enter, with_kwargs=True)
        return block

    def _enter(self, module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            return (self.tensor.enter(args[0]), *args[1:]), kwargs
        return args, {**kwargs, "hidden_states": self.tensor.enter(kwargs["hidden_states"])}

    def _adopt_parameters(self) -> None:
        """Put our parameters (right dtype, right cut) in place of those that transformers made, and check the table."""
        found = {name for name, _ in self.named_parameters()}
        if found != set(self.weights):
            raise RuntimeError(f"the table of {self.family.model_type} does not match transformers: {found ^ set(self.weights)}")
        for name, parameter in self._parameters_made.items():
            parent, leaf = name.rsplit(".", 1)
            self.get_submodule(parent).register_parameter(leaf, parameter)
        del self._parameters_made

    def _replace_dropout(self, clock: DropoutClock) -> None:
        heads = self.shape.heads // self.tensor.size
        for path, module in list(self.named_modules()):
            if isinstance(module, nn.Dropout):
                parent, leaf = path.rsplit(".", 1)
                setattr(self.get_submodule(parent), leaf, HashDropout(module.p, path, clock))
        for layer in self.part.layers:
            attention = self.get_submodule(f"{self.family.blocks}.{layer}.{self.family.enters[0]}")
            attention.attention_site = HashDropout(self._attention_probability(attention), f"attention.{layer}", clock)
            setattr(attention, "first_head", self.tensor.rank * heads)  # noqa: B010

    @staticmethod
    def _attention_probability(attention: nn.Module) -> float:
        """Llama keeps the number, GPT-2 a module that its own code asks for the number."""
        module = getattr(attention, "attn_dropout", None)
        return module.p if isinstance(module, HashDropout) else cast(float, attention.attention_dropout)


class _Rotary:
    """Rotary cosines and sines. No module: ``to_empty`` would wipe its frequencies, which are no parameters."""

    def __init__(self, kind: type[nn.Module], config: PreTrainedConfig) -> None:
        self.module = kind(config)
        self.tables: dict[tuple[int, torch.dtype], tuple[Tensor, Tensor]] = {}

    def table(self, hidden: Tensor) -> tuple[Tensor, Tensor]:
        """(cosines, sines), each (1, sequence, head_dim), in the format and on the device of ``hidden``."""
        key = hidden.shape[1], hidden.dtype
        if key not in self.tables:
            positions = torch.arange(hidden.shape[1], device=hidden.device).unsqueeze(0)
            self.tables[key] = self.module.to(hidden.device)(hidden, positions)
        return self.tables[key]


class _Holder(nn.Module):
    """A module that only holds a weight."""

    def __init__(self, weight: nn.Parameter) -> None:
        super().__init__()
        self.weight = weight
