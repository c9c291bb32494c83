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

    buckets: Mapping[str, Tensor]
    own_heads: int
    most_heads: int
    norm: Any

    def forward(self, received: Boundary, batch: Batch, gradient: Tensor | None) -> Boundary | tuple[Tensor, Tensor]:
        """Compute a microbatch. In ``batch`` are ``ids`` and ``labels`` of prompt and response, one behind the other, and in
        ``documents`` the places in which prompts begin and end."""
        tensors = dict(received) if received else self._looked_up(batch["ids"])
        tensors |= self._biases(tensors, batch.get("documents"))
        for number, paths in enumerate(self.groups):
            names = [name for name in (ENCODER, DECODER, NORM, *BIAS.values()) if name in tensors]
            results = self.compute(number, partial(self._layers, paths, names), [tensors[name] for name in names])
            tensors |= zip((ENCODER, DECODER), results, strict=True)
        if not self.span.last:
            return {name: tensors[name] for name in crossing(self.shape.encoder, self.shape.layers, self.span.layers.stop)}
        hidden, = opened(self.head_units, tensors[DECODER])
        hidden = self.get_submodule("decoder.dropout")(self.get_submodule(self.family.norm)(hidden)) * self.family.head_scale
        prompt = self.shape.prompt
        loss, count = closed(self.head_units, *self.objective(hidden, batch, lambda labels: labels[:, prompt:], gradient))
        return loss, count

    def _looked_up(self, ids: Tensor) -> Boundary:
        """Return what the first stage hands on, or begins with."""
        for unit in self.embedding_units:
            unit.need()
        hidden = self.get_submodule(self.family.embedding)(ids)
        prompt = self.shape.prompt
        tensors = {ENCODER: hidden[:, :prompt], DECODER: hidden[:, prompt:]}
        tensors = {stack: self.get_submodule(f"{stack}.dropout")(states) for stack, states in tensors.items()}
        tensors[NORM] = self.get_parameter("encoder.final_layer_norm.weight").clone()  # what a unit frees, these keep
        for stack, name in POSITIONS.items():
            table = self.get_parameter(f"{stack}.{TABLE}")
            tensors[name] = F.pad(table, (0, self.most_heads - table.shape[1])).clone()
        for unit in self.embedding_units:
            unit.release()
        return tensors

    def _biases(self, tensors: Boundary, documents: Tensor | None) -> Boundary:
        """Return what is added to scores: biases of positions, and the least number where a token must not look."""
        hidden = tensors[DECODER]
        least, prompt = torch.finfo(hidden.dtype).min, self.shape.prompt
        padding = hidden.new_zeros(1, 1, 1, prompt)
        if documents is not None:
            places = torch.arange(prompt, device=hidden.device)
            padding = hidden.new_zeros(len(hidden), 1, 1, prompt).masked_fill_(
                (places >= documents[:, 1:2])[:, None, None], least)
        later = hidden.new_full((hidden.shape[1],) * 2, least).triu_(1)
        masks, biases = {ENCODER: padding, DECODER: later}, {BIAS["cross"]: padding}
        for stack, name in POSITIONS.items():
            if name in tensors:
                table = tensors[name][:, :self.own_heads]
                biases[BIAS[stack]] = F.embedding(self.buckets[stack], table).permute(2, 0, 1).unsqueeze(0) + masks[stack]
        return biases

    def _layers(self, paths: Sequence[str], names: Sequence[str], *values: Tensor) -> tuple[Tensor, Tensor]:
        """Return the hidden states of encoder and decoder behind some layers."""
        tensors = dict(zip(names, values, strict=True))
        for path in paths:
            layer, block = self.span.layers[self.blocks.index(path)], self.get_submodule(path)
            with profiled(path), self.precision.computing():
                if layer >= self.shape.encoder:
                    tensors[DECODER] = block(tensors[DECODER], None, tensors[BIAS[DECODER]], tensors[ENCODER], None,
                                             tensors[BIAS["cross"]])[0]
                    continue
                tensors[ENCODER] = block(tensors[ENCODER], None, tensors[BIAS[ENCODER]])[0]
                if layer == self.shape.encoder - 1:
                    tensors[ENCODER] = self.get_submodule("encoder.dropout")(self.norm(tensors[ENCODER], tensors[NORM]))
        return tensors[ENCODER], tensors[DECODER]


def _entered(stage: TransformersStage, _: nn.Module, args: Any, settings: dict[str, Any]) -> tuple[Any, dict[str, Any]]:
    """Sum the gradient of the encoder's output, of which a rank's heads have a share."""
    states = settings.get("key_value_states")
    return args, settings if states is None else {**settings, "key_value_states": stage.tensor.enter(states)}


def join_stacks(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach this rank's heads, dropout, and what a stage has besides its blocks."""
    family, shape, clock, decoder = stage.family, stage.shape, stage.around.clock, stage.family.decoder
    assert isinstance(stage, EncoderDecoderStage) and decoder is not None
    own = heads_of(shape.heads, shape.kv_heads, stage.tensor.size, stage.tensor.rank).query
    stage.own_heads, stage.most_heads = len(own), len(heads_of(shape.heads, shape.kv_heads, stage.tensor.size, 0).query)
    names = f"{ENCODER}.{TABLE}", f"{DECODER}.{TABLE}", "encoder.final_layer_norm.weight"
    of_first = {path: whole.get_submodule(path) for path in (name.removesuffix(".weight") for name in names)}
    for block in stage.blocks:
        for inner in (family.attention, decoder.cross):
            if (path := f"{block}.{inner}") not in dict(stage.named_modules()):
                continue
            attention: Any = stage.get_submodule(path)
            attention.attention_site = HashDropout(attention.dropout, path, clock, torch.arange(own.start, own.stop,
                                                                                              device=stage.positions.device))
            if attention.has_relative_attention_bias:
                del attention.relative_attention_bias  # the first stage has it
            attention.register_forward_pre_hook(partial(_entered, stage), with_kwargs=True)
    first: Any = whole.get_submodule(f"{family.path(0)}.{family.attention}")
    stage.buckets = {}
    for stack, tokens in {ENCODER: shape.prompt, DECODER: len(stage.positions) - shape.prompt}.items():
        stage.graft(f"{stack}.dropout", whole.get_submodule(f"{stack}.dropout"))
        places = torch.arange(tokens, device=stage.positions.device)  # not while computing: fp64 also has the buckets of fp32
        stage.buckets[stack] = first._relative_position_bucket(
            places - places[:, None], stack == ENCODER, first.relative_attention_num_buckets,
            first.relative_attention_max_distance)
    norm = of_first["encoder.final_layer_norm"]
    stage.norm = lambda hidden, weight: functional_call(norm, {"weight": weight}, (hidden,))
    for path, module in of_first.items() if stage.span.first else ():
        stage.graft(path, module)
    for path, module in list(stage.named_modules()):
        if isinstance(module, nn.Dropout):
            sizes = shape.tokens_of(0 if path.startswith(ENCODER) else shape.encoder, len(stage.positions)), (
                shape.intermediate if "DenseReluDense" in path else shape.hidden)
            stage.set_submodule(path, WideDropout(module.p, path, clock, [sizes], stage.tensor))
