"""Facts about a model family for the control half and the engine, as a table: no torch, no transformers.

A family states where Hugging Face keeps the embedding, the blocks, the last norm and the head, the names of its weights with
their shapes in the engine, and the dimension along which tensor parallelism cuts each weight.
"""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from hpc_mp.layout.models.fields import DROPOUT, ConfigField
from hpc_mp.layout.models.shape import ModelShape

Init = Literal["normal", "residual", "uniform", "ones", "zeros"] | float  # a number: a constant
StoredPart = tuple[tuple[int, ...], str]
POSITIONS = "positions"  # of a token in its document
ATTENTION_DROPOUT = "att"  # what the fields begin with that hold the dropout of attention weights


@dataclass(frozen=True, slots=True)
class Weight:
    """One parameter in the engine's shape, under its name in transformers' module.

    Attributes:
        cut: the dimension that tensor parallelism cuts; None: every rank has the whole weight.
        most_parts: number of key-value heads along ``cut``, each of which several ranks may hold; None: it has none.
        partial: True if each tensor rank computes a share of the gradient although it holds the whole weight: a router, whose
            choices weight values that ranks have shares of, or a norm of heads, of which each rank has its own.
        experts: True if its first dimension counts experts, which expert parallelism distributes.
        together: number of neighbours along ``cut`` that stay on one rank: a column of a gate with the other half's.
        transposed: True for a parameter of experts that is (experts, in, out) instead of (experts, …, in).
        row: True if it belongs to a projection whose inputs are cut. Its bias is whole, and is added once, to the sum.
        stored: its place in a checkpoint, if not under its own name: (first indices, name) of every part, in row-major order.
        trained: False if it keeps its values, so that it has neither a gradient nor optimizer state.
        deviation: that of its normal values; None: ``initializer_range``.
    """

    name: str
    shape: tuple[int, ...]
    cut: int | None = None
    init: Init = "normal"
    most_parts: int | None = None
    partial: bool = False
    experts: bool = False
    together: int = 1
    transposed: bool = False
    row: bool = False
    stored: tuple[StoredPart, ...] = ()
    trained: bool = True
    deviation: float | None = None

    @property
    def fused_shape(self) -> tuple[int, ...]:
        """The shape in transformers' module, where separately cut parts are side by side: (in, n x out) for (in, n, out)."""
        if not self.cut:
            return self.shape
        before = self.cut - 1
        return *self.shape[:before], self.shape[before] * self.shape[self.cut], *self.shape[self.cut + 1:]


def norm(name: str, size: int, *, bias: bool = False, init: Init = "ones") -> tuple[Weight, ...]:
    """Return the weights of a norm."""
    vector = Weight(f"{name}.weight", (size,), init=init)
    return (vector, Weight(f"{name}.bias", (size,), init="zeros")) if bias else (vector,)


def column(name: str, out: int, inner: int, bias: bool = False, most_parts: int | None = None) -> tuple[Weight, ...]:
    """Return the weights of a matrix (out, inner) whose rows are cut: the outputs of a projection (Megatron-LM,
    arXiv:1909.08053), or the tokens of an embedding."""
    matrix = Weight(f"{name}.weight", (out, inner), cut=0, most_parts=most_parts)
    return (matrix, Weight(f"{name}.bias", (out,), cut=0, init="zeros", most_parts=most_parts)) if bias else (matrix,)


def row(name: str, out: int, inner: int, bias: bool = False, init: Init = "normal") -> tuple[Weight, ...]:
    """Return the weights of a projection (out, inner) whose inputs are cut."""
    matrix = Weight(f"{name}.weight", (out, inner), cut=1, row=True, init=init)
    return (matrix, Weight(f"{name}.bias", (out,), init="zeros", row=True)) if bias else (matrix,)


@dataclass(frozen=True, slots=True)
class Decoder:
    """The second stack of blocks in a model with an encoder, whose layers are the first ones."""

    blocks: str  # its module
    first: int  # number of its first layer; the encoder has so many
    cross: str  # the attention of its blocks to the encoder's output
    mlp: str  # that of its blocks


@dataclass(frozen=True, slots=True)
class Family:
    """The table of one family.

    Attributes:
        model_type: Hugging Face's name.
        architecture: the class of transformers, which makes the model and is written into an exported config.
        since: the first release of transformers whose code of it the engine knows.
        fields: allowed values of each field of its configuration; a field without an entry is refused.
        read: config dictionary -> ModelShape, with Hugging Face's defaults.
        embedding, blocks, norm, head: module names inside that class; ``norm`` stands between blocks and head.
        code: the module of transformers that has its code; None: that of its model_type.
        rotary: the modules that make rotary cosines and sines.
        lookups: further embeddings, which are added to that of the token: module -> its index of each token, ``POSITIONS`` or
            a tensor of the batch (zeros if the batch has none).
        behind_embedding: modules applied to the sum, in this order.
        attention, mlp: modules of a block; the projections cut in each share its input (one gradient all-reduce each).
        attention_dropout: the module inside ``attention`` that drops attention weights (None: the attention function gets a
            probability).
        transposed: True if projections store (in, out) as GPT-2's Conv1D does, instead of (out, in).
        cut_with: modules at the top of a block that are cut together with another one, by whose name: name -> the other.
        experts: the module of a block's experts, which are cut inside each expert.
        router: the module beside them that chooses experts for tokens; empty if it does not return logits, weights and choices.
        apart: modules of a layer with experts that are cut each by itself, the experts first: what is beside them every rank
            computes in full. Empty: such a layer is cut as a whole, and each rank has a share of the router's gradient.
        block_weights: the parameters of a block, given its layer.
        embedding_weights, norm_weights, head_weights: those around the blocks, by full name; the first are of all embeddings and
            of what is behind them.
        older_names: pattern of a part of a weight's name -> the same in older checkpoints, which transformers still reads.
        beside: name patterns of a checkpoint's weights that other models of the family use.
        whole: modules of a block that are never cut -> the reason.
        alike: True if a model of one layer has all modules but further layers.
        unattended: layers that mix tokens by something else than attention.
        needs_samples, needs_tokens: why context ranks, and ranks of sequence parallelism, cannot share the tokens of samples;
            empty if they can.
        own_attention: True if its own code computes attention, by scores to which it adds a mask.
        selected: modules of a block that compute heads of other ranks too -> the order of heads in what they return, as
            ``selected_heads`` takes it.
        drops_by: the operation by which its code drops elements, other ones on each layout; empty: it has modules for that.
        dropout: the largest probability in the configuration of a model that was read.
        tuples: True if a layer returns a tuple, in which hidden states are first.
        head_scale: what hidden states are multiplied with before the head.
        output: the hidden states in what the base returns.
        behind_norm: modules behind ``norm``, outside of the base, in this order.
        first_token: True if ``norm`` computes with the first token of samples alone.
        twice: a module of dropout that a forward calls twice.
        classifier: the attributes of its model for classification that are others than those of ``classifying``.
        fresh: name patterns of weights that begin with initial values if a checkpoint lacks them.
        depth: parts of the name of a module of a block that is cut as a whole.
        decoder: the blocks behind those of ``blocks``, which then are an encoder.
    """

    model_type: str
    architecture: str
    fields: Mapping[str, ConfigField]
    read: Callable[[Mapping[str, Any]], ModelShape]
    embedding: str
    blocks: str
    norm: str
    head: str
    attention: str
    block_weights: Callable[[ModelShape, int], tuple[Weight, ...]]
    embedding_weights: Callable[[ModelShape], tuple[Weight, ...]]
    norm_weights: Callable[[ModelShape], tuple[Weight, ...]]
    head_weights: Callable[[ModelShape], tuple[Weight, ...]]
    since: str = "5.0"
    code: str | None = None
    rotary: tuple[str, ...] = ()
    lookups: Mapping[str, str] = field(default_factory=dict)
    behind_embedding: tuple[str, ...] = ()
    mlp: str = "mlp"
    attention_dropout: str | None = None
    transposed: bool = False
    cut_with: Mapping[str, str] = field(default_factory=dict)
    experts: str | None = None
    router: str = "gate"
    older_names: Mapping[str, str] = field(default_factory=dict)
    beside: tuple[str, ...] = ()
    whole: Mapping[str, str] = field(default_factory=dict)
    alike: bool = True
    apart: tuple[str, ...] = ()
    unattended: frozenset[int] = frozenset()
    needs_samples: str = ""
    needs_tokens: str = ""
    own_attention: bool = False
    selected: Mapping[str, str] = field(default_factory=dict)
    drops_by: str = ""
    dropout: float = 0.0
    tuples: bool = False
    head_scale: float = 1.0
    output: str = "last_hidden_state"
    behind_norm: tuple[str, ...] = ()
    first_token: bool = False
    twice: str = ""
    classifier: Mapping[str, Any] = field(default_factory=dict)
    fresh: tuple[str, ...] = ()
    depth: int = 1
    decoder: Decoder | None = None

    @property
    def base(self) -> str:
        """The module whose forward calls all others but the head."""
        return self.blocks.partition(".")[0]

    @property
    def modules(self) -> tuple[str, ...]:
        """The modules of transformers that a rank needs (imported before ranks are forked)."""
        return self.code or f"transformers.models.{self.model_type}.modeling_{self.model_type}",

    @property
    def dropouts(self) -> tuple[str, ...]:
        """The fields of its configuration that hold a dropout probability."""
        return tuple(name for name, entry in self.fields.items() if entry is DROPOUT)

    def attention_probability(self, config: Any) -> float:
        """Return the probability with which a configuration of transformers drops attention weights."""
        return max((getattr(config, name) for name in self.dropouts if name.startswith(ATTENTION_DROPOUT)), default=0.0)

    @property
    def enters(self) -> tuple[str, ...]:
        """The modules of a block whose input the projections cut in them share."""
        return self.attention, self.mlp, *((self.decoder.cross, self.decoder.mlp) if self.decoder else ())

    def entered(self, shape: ModelShape, layer: int) -> tuple[str, ...]:
        """Return the modules of a layer into which hidden states are copied for the projections cut in them."""
        if self.decoder:
            return tuple(inner for inner in self.enters if any(
                weight.name.startswith(f"{inner}.") for weight in self.block_weights(shape, layer)))
        return (self.attention, *self.apart) if self.apart and shape.experts_of(layer) else self.enters

    def path(self, layer: int) -> str:
        """Return the module of a layer."""
        if self.decoder and layer >= self.decoder.first:
            return f"{self.decoder.blocks}.{layer - self.decoder.first}"
        return f"{self.blocks}.{layer}"

    def in_block(self, name: str) -> tuple[str, int, str] | None:
        """Return the blocks that a name is inside of, the number in its own stack, and the rest of the name; None: outside."""
        for blocks in (self.blocks, *((self.decoder.blocks,) if self.decoder else ())):
            if name.startswith(f"{blocks}."):
                number, _, inner = name.removeprefix(f"{blocks}.").partition(".")
                return blocks, int(number), inner
        return None

    def projections(self, shape: ModelShape, layer: int) -> dict[str, Weight]:
        """Return the matrices of the projections of a block by the projections' names inside it."""
        return {weight.name.removesuffix(".weight"): weight for weight in self.block_weights(shape, layer)
                if weight.cut is not None and weight.name.endswith(".weight")}

    def layer_weights(self, shape: ModelShape, layer: int) -> tuple[Weight, ...]:
        """Return the parameters of a block under their Hugging Face names."""
        path = self.path(layer)
        return tuple(replace(weight, name=f"{path}.{weight.name}",
                             stored=tuple((at, name.replace("{}", f"{layer}", 1)) for at, name in weight.stored))
                     for weight in self.block_weights(shape, layer))

    def own_head_weights(self, shape: ModelShape) -> tuple[Weight, ...]:
        """Return the parameters of the head without those of the embedding."""
        return tuple(weight for weight in self.head_weights(shape) if not shape.tied or weight.name != f"{self.head}.weight")

    def all_weights(self, shape: ModelShape) -> tuple[Weight, ...]:
        """Return every parameter of the model once, under its Hugging Face name; a tied one under the embedding's."""
        layers = [weight for layer in range(shape.layers) for weight in self.layer_weights(shape, layer)]
        return (*self.embedding_weights(shape), *layers, *self.norm_weights(shape), *self.own_head_weights(shape))

    @property
    def block_modules(self) -> tuple[str, ...]:
        """The modules of a block that tensor parallelism cuts, each as a whole."""
        return tuple(module for module in map(self.block_module, self.enters) if module not in self.whole)

    def block_module(self, inner: str) -> str:
        """Return the module of a block that something inside it is cut with."""
        top = ".".join(inner.split(".")[:self.depth])
        return self.cut_with.get(top, top)

    def has_heads(self, module: str) -> bool:
        """Return True for a module of a block that is cut by heads."""
        attentions = self.attention, *((self.decoder.cross,) if self.decoder else ())
        return any(module.endswith(f".{self.block_module(inner)}") for inner in attentions)

    def attention_of(self, layer: int) -> str | None:
        """Return the module that the attention of a layer is cut with; None if it is never cut."""
        module = self.block_module(self.attention)
        return f"{self.path(layer)}.{module}" if module in self.block_modules else None

    def head_module(self, shape: ModelShape) -> str:
        """Return the module that the head is cut with: the embedding if it is tied to it."""
        return self.embedding if shape.tied else self.head

    def module_of(self, shape: ModelShape, name: str) -> str | None:
        """Return the module that a weight is cut with; None for norms and other weights that are never cut."""
        if (place := self.in_block(name)) is not None:
            blocks, number, inner = place
            module = self.block_module(inner)
            return f"{blocks}.{number}.{module}" if module in self.block_modules else None
        if name.startswith(f"{self.embedding}."):
            return self.embedding
        head = {weight.name for weight in self.head_weights(shape) if weight.cut is not None}
        return self.head_module(shape) if name in head else None

    def is_behind_embedding(self, name: str) -> bool:
        """Return True for a weight with which the sum of the embeddings is computed on, so that its backward needs it."""
        return name.startswith(tuple(f"{path}." for path in self.behind_embedding))

    def without_layer(self, name: str) -> tuple[str, int | None]:
        """Return a name with ``{}`` in place of its layer's number, and that number; None for a name outside the blocks."""
        if (place := self.in_block(name)) is None:
            return name, None
        blocks, number, inner = place
        return f"{blocks}.{{}}.{inner}", number


def classifying(family: Family) -> Family:
    """Return the family of the models for classification, whose head is whole on every tensor rank: it has few rows."""
    architecture = f"{re.split('For|LMHead', family.architecture)[0]}ForSequenceClassification"
    own: dict[str, Any] = {"head": "score", "head_scale": 1.0, "head_weights": lambda shape: (Weight(
        "score.weight", (shape.classes, shape.hidden)),), "fresh": ("score.*",), "beside": (*family.beside, f"{family.head}.*")}
    return replace(family, architecture=architecture, **{**own, **family.classifier})
