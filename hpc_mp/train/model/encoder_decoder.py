"""A stage of a model with an encoder and a decoder: the blocks of transformers' T5 in a loop of the engine's own.

A sample is a prompt and a response of fixed lengths, in one row of ids. The first stage looks both up. Every stage carries the
encoder's and the decoder's hidden states side by side, and what later layers need of the tables of positions and of the norm
behind the encoder, see ``families/t5.py``. Their gradients come back from the stages that use them.
"""

from collections.abc import Mapping, Sequence
from functools import partial
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.func import functional_call

from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models.families.t5 import TABLE
from hpc_mp.layout.models.tensor import heads_of
from hpc_mp.train.device.spans import profiled
from hpc_mp.train.model.transformers_modules import TransformersModules
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.model.unit_stage import closed, opened
from hpc_mp.train.parallel.dropout import HashDropout, WideDropout
from hpc_mp.train.pipeline.stage import Batch, Boundary, Carried

ENCODER, DECODER, NORM = "encoder", "decoder", "norm"  # hidden states, and the weight of the norm between them
POSITIONS = {ENCODER: "encoder positions", DECODER: "decoder positions"}  # tables of this rank's heads
BIAS = {ENCODER: "encoder bias", DECODER: "decoder bias", "cross": "cross bias"}  # of scores
BETWEEN, DROPOUTS = "encoder.final_layer_norm", ("dropout", "dropout 1")  # the latter before and behind the layers of a stack


def crossing(encoder: int, layers: int, begin: int) -> tuple[str, ...]:
    """Return the names of what crosses to a stage that begins with this layer.

    Args:
        encoder, layers: numbers of the encoder's and of all layers.
    """
    to_decoder = (ENCODER, POSITIONS[DECODER]) if begin < layers else ()
    return DECODER, *to_decoder, *((POSITIONS[ENCODER], NORM) if begin < encoder else ())


def carried(model: TransformersModules, layout: Layout, stage: int, dtype: torch.dtype) -> Mapping[str, Carried]:
    """Return the tensors that a stage receives. Tables are as wide as those of the rank with the most heads."""
    shape = model.shape
    table = model.config.relative_attention_num_buckets, len(heads_of(shape.heads, shape.heads, layout.degrees.tensor, 0).query)
    lengths = {ENCODER: shape.prompt, DECODER: layout.sequence - shape.prompt}
    sizes = {**{stack: (layout.samples, length, shape.hidden) for stack, length in lengths.items()},
             **dict.fromkeys(POSITIONS.values(), table), NORM: (shape.hidden,)}
    names = crossing(shape.encoder, shape.layers, sum(layout.layers[:stage])) if stage else ()
    return {name: Carried(sizes[name], dtype) for name in names}


class EncoderDecoderStage(TransformersStage):
    """One stage.

    Attributes:
        buckets: of the encoder and of the decoder: the row of the table for each query and key.
        own_heads, most_heads: number of heads of this tensor rank, and of the one that has the most.
        norm: function of hidden states and of a weight.
    """

    buckets: dict[str, Tensor]
    own_heads: int
    most_heads: int
    norm: Any

    def forward(self, received: Boundary, batch: Batch, gradient: Tensor | None) -> Boundary | tuple[Tensor, Tensor]:
        """Compute a microbatch. In ``batch`` are ``ids`` and ``labels`` of prompt and response, one behind the other, and in
        ``documents`` the places in which prompts begin and end."""
        tensors = dict(received) if received else self._looked_up(batch["ids"])
        tensors |= self._score_biases(tensors, batch.get("documents"))
        for number, paths in enumerate(self.groups):
            names = [name for name in (ENCODER, DECODER, NORM, *BIAS.values()) if name in tensors]
            results = self.compute(number, partial(self._layers, paths, names), [tensors[name] for name in names])
            tensors |= zip((ENCODER, DECODER), results, strict=True)
        if not self.span.last:
            return {name: tensors[name] for name in crossing(self.shape.encoder, self.shape.layers, self.span.layers.stop)}
        hidden, = opened(self.head_units, tensors[DECODER])
        hidden = self._dropped(DECODER, 1, self.get_submodule(self.family.norm)(hidden)) * self.family.head_scale
        prompt = self.shape.prompt
        loss, count = closed(self.head_units, *self.objective(hidden, batch, lambda labels: labels[:, prompt:], gradient))
        return loss, count

    def _dropped(self, stack: str, end: int, hidden: Tensor) -> Tensor:
        dropped: Tensor = self.get_submodule(f"{stack}.{DROPOUTS[end]}")(hidden)
        return dropped

    def _looked_up(self, ids: Tensor) -> Boundary:
        """Return what the first stage hands on, or begins with."""
        for unit in self.embedding_units:
            unit.need()
        hidden, prompt = self.get_submodule(self.family.embedding)(ids), self.shape.prompt
        tensors = {ENCODER: self._dropped(ENCODER, 0, hidden[:, :prompt]), DECODER: self._dropped(DECODER, 0, hidden[:, prompt:])}
        tensors[NORM] = self.get_parameter(f"{BETWEEN}.weight").clone()  # which stays when a unit is freed
        for stack, name in POSITIONS.items():
            table = self.get_parameter(f"{stack}.{TABLE}")
            tensors[name] = F.pad(table, (0, self.most_heads - table.shape[1])).clone()
        for unit in self.embedding_units:
            unit.release()
        return tensors

    def _score_biases(self, tensors: Boundary, documents: Tensor | None) -> Boundary:
        """Return what is added to scores: biases of positions, and the least number where a token must not look."""
        hidden = tensors[DECODER]
        least, prompt = torch.finfo(hidden.dtype).min, self.shape.prompt
        padding = hidden.new_zeros(1, 1, 1, prompt)
        if documents is not None:
            places = torch.arange(prompt, device=hidden.device)
            padding = padding.masked_fill((places >= documents[:, 1:2])[:, None, None], least)
        later = hidden.new_full((hidden.shape[1],) * 2, least).triu_(1)
        masks, biases = {ENCODER: padding, DECODER: later}, {BIAS["cross"]: padding}
        for stack in {ENCODER if layer < self.shape.encoder else DECODER for layer in self.span.layers}:
            table = tensors[POSITIONS[stack]][:, :self.own_heads]
            biases[BIAS[stack]] = F.embedding(self.buckets[stack], table).permute(2, 0, 1).unsqueeze(0) + masks[stack]
        return biases

    def _layers(self, paths: Sequence[str], names: Sequence[str], *values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states of encoder and decoder behind some layers."""
        tensors = dict(zip(names, values, strict=True))
        for path in paths:
            layer, block = self.span.layers[self.blocks.index(path)], self.get_submodule(path)
            with profiled(path), self.precision.computing():
                if layer >= self.shape.encoder:
                    encoded = self.tensor.enter(tensors[ENCODER])  # of whose gradient each rank's heads have a share
                    tensors[DECODER] = block(tensors[DECODER], None, tensors[BIAS[DECODER]], encoded, None,
                                             tensors[BIAS["cross"]])[0]
                    continue
                tensors[ENCODER] = block(tensors[ENCODER], None, tensors[BIAS[ENCODER]])[0]
                if layer == self.shape.encoder - 1:
                    tensors[ENCODER] = self._dropped(ENCODER, 1, self.norm(tensors[ENCODER], tensors[NORM]))
        return tensors[ENCODER], tensors[DECODER]


def join_stacks(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach this rank's heads, dropout, and what a stage has besides its blocks."""
    assert isinstance(stage, EncoderDecoderStage)
    shape, clock, config, device = stage.shape, stage.around.clock, model.config, stage.positions.device
    own, widest = (heads_of(shape.heads, shape.kv_heads, stage.tensor.size, rank).query for rank in (stage.tensor.rank, 0))
    rows, lengths = torch.arange(own.start, own.stop, device=device), (shape.prompt, len(stage.positions) - shape.prompt)
    stage.own_heads, stage.most_heads, stage.buckets = len(own), len(widest), {}
    names = *(f"{stack}.{TABLE}".removesuffix(".weight") for stack in POSITIONS), BETWEEN
    ends = {path: whole.get_submodule(path) for path in names}
    attention: Any = whole.get_submodule(f"{stage.family.path(0)}.{stage.family.attention}")
    for stack, length in zip(POSITIONS, lengths, strict=True):
        places = torch.arange(length, device=device)  # not while computing: fp64 has the buckets of fp32 too
        stage.buckets[stack] = attention._relative_position_bucket(
            places - places[:, None], stack == ENCODER, config.relative_attention_num_buckets,
            config.relative_attention_max_distance)
        for name in DROPOUTS:
            stage.graft(f"{stack}.{name}", nn.Dropout(config.dropout_rate))
    for path, module in list(stage.named_modules()):
        if isinstance(module, nn.Dropout):
            size = lengths[not path.startswith(ENCODER)], shape.intermediate if "DenseReluDense" in path else shape.hidden
            stage.set_submodule(path, WideDropout(module.p, path, clock, [size], stage.tensor))
        elif isinstance(module, type(attention)):
            module.attention_site = HashDropout(config.dropout_rate, path, clock, rows)
            module._modules.pop("relative_attention_bias", None)  # the first stage has it
    stage.norm = lambda hidden, weight: functional_call(ends[BETWEEN], {"weight": weight}, (hidden,))
    for path, module in ends.items() if stage.span.first else ():
        stage.graft(path, module)
