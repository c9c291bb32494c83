"""A section: the layers of one stage of the pipeline, as Hugging Face's own blocks, driven by our own loop.

The blocks are built on the meta device, their projections replaced by cut ones; their parameters are views of flat units, which
the data axis owns. The module tree carries Hugging Face's names, so that ``named_parameters`` are the names of a checkpoint.
"""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import Tensor, nn
from torch.utils._pytree import tree_flatten, tree_leaves, tree_unflatten

from hpc_mp.layout.flat import EMBEDDING, HEAD, TIED, StageSpan, blocks_together
from hpc_mp.train.engine.capacity import Capacity, Intake
from hpc_mp.train.engine.compilation import as_it_is, compile_block, compiled
from hpc_mp.train.engine.context import ContextAxis
from hpc_mp.train.engine.data_axis import Unit
from hpc_mp.train.engine.dropout import DropoutClock, HashDropout
from hpc_mp.train.engine.expert_axis import ExpertAxis
from hpc_mp.train.engine.experts import ExpertProjection, Experts
from hpc_mp.train.engine.families import HALVES
from hpc_mp.train.engine.gradients import Sink
from hpc_mp.train.engine.precision import Precision
from hpc_mp.train.engine.projection import Projection, TensorAxis
from hpc_mp.train.engine.recompute import computed_again, groups_of
from hpc_mp.train.engine.router_loss import RouterLoss
from hpc_mp.train.engine.vocabulary import NextToken, VocabularyEmbedding

if TYPE_CHECKING:  # a rank imports transformers when it has met the others
    from hpc_mp.train.engine.causal_model import CausalModel

Boundary = dict[str, Tensor]  # what crosses from one stage to the next, by name
HIDDEN = "hidden"


@dataclass(frozen=True, slots=True)
class Batch:
    """What a stage needs of a microbatch, on the device.

    Attributes:
        ids, labels: on the first and on the last stage, (batch, sequence); labels are shifted already.
        begins: on all stages, at which place of its sample each token's document begins, (batch, sequence of whole samples):
            tokens attend to their own document, in which positions count from 0. None: every sample is one document.
    """

    ids: Tensor | None = None
    labels: Tensor | None = None
    begins: Tensor | None = None

    def of(self, context: ContextAxis) -> "Batch":
        """What this rank of a context group computes of whole samples."""
        ids, labels = (None if each is None else context.own(each) for each in (self.ids, self.labels))
        return Batch(ids, labels, self.begins)


@dataclass(frozen=True, slots=True)
class Ahead:
    """Units that are asked for before their turn, which comes next in a forward or in a backward."""

    forward: Sequence[str] = ()
    backward: Sequence[str] = ()


class StageSection(nn.Module):
    """One stage.

    Args:
        whole: the model's skeleton.
        span: which layers, and whether embedding and head belong to it.
        context: which tokens of a sample attention sees on this rank, and how they attend to the others.
        clock: tells dropout where training is.
        recompute: which blocks are computed again in the backward, see ``recompute``.
        experts: the ranks that share out the experts of a block.
        router_loss: what routers add to the loss.
        capacity: of experts.
        compile: whether blocks and the loss are compiled, see ``compilation``.

    Attributes:
        padding: embedding name -> its row that stays zero, where the model has one.
    """

    def __init__(self, model: "CausalModel", whole: nn.Module, span: StageSpan, tensor: TensorAxis, context: ContextAxis,
                 precision: Precision, clock: DropoutClock, recompute: str, experts: ExpertAxis, router_loss: RouterLoss,
                 capacity: Capacity, compile: bool = False) -> None:
        super().__init__()
        self.recompute, self.experts, self.router_loss, self.capacity = recompute, experts, router_loss, capacity
        self.config, self.family, self.shape = model.config, model.family, model.shape
        self.span, self.tensor, self.context_axis, self.precision = span, tensor, context, precision
        self.positions = context.positions
        self.torch_half, self.attention_function = HALVES[self.family.model_type], model.attention_function
        self._rotary: list[nn.Module] = []  # no part of the tree: it has no parameters, and its buffers are made with values
        if self.family.rotary is not None:
            with precision.computing():
                self._rotary.append(type(whole.get_submodule(self.family.rotary))(model.config))
        with precision.computing():
            self.buffers_of_blocks = self.torch_half.buffers(self)
        row = cast(nn.Embedding, whole.get_submodule(self.family.embedding)).padding_idx
        self.padding = {} if row is None else {f"{self.family.embedding}.weight": row}
        if span.first:
            self._build_embedding(whole)
        for layer in span.layers:
            path = f"{self.family.blocks}.{layer}"
            block = model.block(whole, layer)
            self._cut(block, path)
            self._graft(path, block)
        if span.last:
            self._build_head(whole, compiled if compile else as_it_is)
        self._replace_dropout(clock)
        if compile:
            for layer in span.layers:
                compile_block(self.get_submodule(f"{self.family.blocks}.{layer}"))
        _check_buffers(self)
        self._context: dict[str, Any] | None = None  # of blocks, where it is the same for all samples
        self.units: dict[str, Unit] = {}

    def adopt(self, units: Mapping[str, Unit]) -> None:
        """Put the parameters of this stage's flat units in place of those that transformers made."""
        self.units = dict(units)
        parameters = {name: parameter for unit in self.units.values() for name, parameter in unit.parameters.items()}
        sinks = {name: sink for unit in self.units.values() for name, sink in unit.sinks.items()}
        others = [name for name, _ in self.named_parameters()]
        owned: set[str] = set()
        for module in self.modules():
            if isinstance(module, Projection | ExpertProjection | VocabularyEmbedding):
                module.adopt(parameters, sinks)
                owned |= module.owned
        for name in others:
            parent, leaf = name.rsplit(".", 1)
            self.get_submodule(parent).register_parameter(leaf, parameters[name])
        for name in parameters.keys() - owned:
            parameters[name].register_post_accumulate_grad_hook(partial(_collect, sinks[name]))

    def tensors(self) -> Iterator[Tensor]:
        """What a stage holds besides activations: its parameters, and what every block gets."""
        yield from (unit.whole for unit in self.units.values())
        yield from (leaf for leaf in tree_leaves(self._context) if isinstance(leaf, Tensor))

    @property
    def rotary(self) -> nn.Module | None:
        return next(iter(self._rotary), None)

    def forward(self, received: Boundary, batch: Batch) -> Boundary | tuple[Tensor, Tensor]:
        """received: what the stage before sent, nothing on the first one. Returns what the next stage gets, or on the last one
        the summed loss and how many labels it is the sum of."""
        hidden = self._embed(batch) if self.span.first else received[HIDDEN]
        context = self._context_of(hidden, batch.begins) if self.span.layers else {}
        groups = list(groups_of([f"{self.family.blocks}.{layer}" for layer in self.span.layers], self.recompute))
        for place, group in enumerate(groups):
            before, behind = groups[max(0, place - 1):place], groups[place + 1:place + 2]
            ahead = Ahead([each[0] for each in behind], [each[0] for each in before])
            hidden = self._within(group, ahead, partial(self._blocks, group, context), hidden)
        if not self.span.last:
            return {HIDDEN: hidden}
        assert batch.labels is not None
        return self._finish(hidden, batch.labels)

    @torch.no_grad()
    def _context_of(self, hidden: Tensor, begins: Tensor | None) -> dict[str, Any]:
        """What every block gets besides hidden states."""
        if begins is not None:
            return self.torch_half.context(self, hidden, begins)
        if self._context is None:
            self._context = self.torch_half.context(self, hidden, None)
        return self._context

    def _embed(self, batch: Batch) -> Tensor:
        assert batch.ids is not None
        units = [self.units[name] for name in (TIED, EMBEDDING) if name in self.units]
        for unit in units:
            unit.need()
        hidden = self.torch_half.embed(self, batch.ids, batch.begins)
        for unit in units:
            unit.release()  # its backward needs no parameter
        return hidden

    def _blocks(self, paths: Sequence[str], context: dict[str, Any], hidden: Tensor) -> Tensor:
        """Blocks that are computed again together, or one that is not."""
        leaves, tree = tree_flatten(context)

        def compute(hidden: Tensor, *leaves: Any) -> Tensor:
            with self.precision.computing():  # a recomputation does not run inside what the backward runs in
                for path in paths:
                    hidden = self._block(path, tree_unflatten(leaves, tree), hidden)
            return hidden

        again = blocks_together(self.recompute) is not None
        return computed_again(compute, hidden, *leaves) if again else compute(hidden, *leaves)

    def _block(self, path: str, context: dict[str, Any], hidden: Tensor) -> Tensor:
        result = self.get_submodule(path)(hidden, **context)
        return cast(Tensor, result if isinstance(result, Tensor) else result[0])

    def _finish(self, hidden: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
        counts: list[Tensor] = []

        def objective(hidden: Tensor) -> Tensor:
            normed = self.get_submodule(self.family.norm)(hidden)
            loss, count = self.objective(normed, labels)
            counts.append(count)
            return cast(Tensor, loss)

        loss = self._within([name for name in (TIED, HEAD) if name in self.units], Ahead(), objective, hidden)
        return loss, counts[0]

    def _within(self, names: Sequence[str], ahead: Ahead, compute: Callable[[Tensor], Tensor], hidden: Tensor) -> Tensor:
        """Compute with units that are there meanwhile, in the forward and again in the backward."""
        units = self._units_of(names)
        training = torch.is_grad_enabled() and any(unit.gathers for unit in units)
        if training:
            hidden = _ReleaseBehind.apply(hidden, units)
        for unit in units:
            unit.need()
        for unit in self._units_of(ahead.forward):
            unit.request()
        hidden = compute(hidden)
        for unit in units:
            unit.release()
        return _NeedBefore.apply(hidden, units, self._units_of(ahead.backward)) if training else hidden

    def _units_of(self, names: Sequence[str]) -> list[Unit]:
        """Those of blocks with all that comes and goes with them, and others by name."""
        return [unit for unit in self.units.values() if unit.layout.block in names]

    def _build_embedding(self, whole: nn.Module) -> None:
        family = self.family
        name = f"{family.embedding}.weight"
        self._graft(family.embedding, VocabularyEmbedding(
            name, self.shape.vocabulary, self.padding.get(name), self.tensor, self._tensor_of(family.embedding)))
        for path in (family.position, family.embedding_dropout):
            if path is not None:
                self._graft(path, whole.get_submodule(path))

    def _build_head(self, whole: nn.Module, wrap: Callable[[Callable[..., Any]], Callable[..., Any]]) -> None:
        family = self.family
        self._graft(family.norm, whole.get_submodule(family.norm))
        name = family.embedding if self.shape.tied else family.head
        bias = next((weight.name for weight in family.head_weights(self.shape) if weight.name == f"{family.head}.bias"), None)
        head = Projection(f"{name}.weight", bias, transposed=False, row=False, tensor=self._tensor_of(name))
        self.objective = NextToken(head, self.shape.vocabulary, self.tensor, wrap)

    def _cut(self, block: nn.Module, path: str) -> None:
        """Replace a block's projections and experts by cut ones, and let the gradient of shared inputs be summed."""
        names = {weight.name for weight in self.family.block_weights(self.shape)}
        attention = self.family.attention
        for inner, how in self.family.projections.items():
            bias = f"{path}.{inner}.bias" if f"{inner}.bias" in names else None
            parent, leaf = inner.rsplit(".", 1)
            tensor = self._tensor_of(f"{path}.{inner}")
            projection = Projection(f"{path}.{inner}.weight", bias, self.family.transposed, how == "row", tensor)
            setattr(block.get_submodule(parent), leaf, projection)
            if how == "row" and parent == attention and tensor.size == 1:
                projection.register_forward_pre_hook(self._own_tokens)
        if self.family.experts is not None:
            self._cut_experts(block, path)
        for inner, values in self.buffers_of_blocks.items():
            parent, leaf = inner.rsplit(".", 1)
            setattr(block.get_submodule(parent), leaf, values)
        if self._tensor_of(f"{path}.{attention}").size > 1:
            self.torch_half.patch(self, block)
        for inner in self.family.enters:
            if self._tensor_of(f"{path}.{inner}").size > 1:
                self._before(block.get_submodule(inner), self.tensor.enter)
            elif inner == attention:
                self._before(block.get_submodule(inner), self.tensor.all_tokens)

    def _cut_experts(self, block: nn.Module, path: str) -> None:
        """Replace a block's experts; each rank has a share of what they and the router say, and the block's module sums it."""
        assert self.family.experts is not None
        parent, leaf = self.family.experts.rsplit(".", 1)
        module, tensor = block.get_submodule(parent), self._tensor_of(f"{path}.{parent}")
        activation = cast(nn.Module, block.get_submodule(self.family.experts).act_fn)
        count = self.shape.experts
        positions = self.positions if tensor.size > 1 else self.tensor.share(self.positions, 0)
        others = self.tensor.sharers if tensor.size == 1 else ()
        sharers = [self.context_axis.axis, *others]
        counts = bool(others) or self.tensor.rank == 0
        intake = Intake(self.capacity, self.context_axis.sequence, positions, sharers, counts)
        setattr(module, leaf, Experts(f"{path}.{self.family.experts}", count, activation, tensor, self.experts, intake))
        if tensor.rank == 0:  # of ranks that see the same tokens, and each find a share of the router's gradient, one adds it
            self.router_loss.attach(module.get_submodule(self.family.router), count, sharers, counts)
        if tensor.size > 1:
            module.register_forward_hook(lambda _, inputs, output: tensor.leave(output.clone()))

    def _tensor_of(self, path: str) -> TensorAxis:
        """The tensor axis as the module that a weight or a module belongs to sees it, which may be whole on every rank."""
        return self.tensor if self.tensor.cut.cuts(self.family.module_of(f"{path}.weight")) else self.tensor.alone

    def _own_tokens(self, module: nn.Module, args: tuple[Tensor, ...]) -> Tensor:
        """Attention that is whole has seen all tokens; what comes behind it computes with this rank's own ones."""
        return self.tensor.share(args[0], 1)

    def _before(self, module: nn.Module, change: Callable[[Tensor], Tensor]) -> None:
        """Have a module compute with changed hidden states."""
        def hook(_: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> tuple[tuple[Any, ...], dict[str, Any]]:
            if args:
                return (change(args[0]), *args[1:]), kwargs
            return args, {**kwargs, "hidden_states": change(kwargs["hidden_states"])}

        module.register_forward_pre_hook(hook, with_kwargs=True)

    def _graft(self, path: str, module: nn.Module) -> None:
        """Attach a module under its Hugging Face path."""
        *parents, leaf = path.split(".")
        node: nn.Module = self
        for name in parents:
            if name not in node._modules:
                node.add_module(name, nn.Module())
            node = node.get_submodule(name)
        node.add_module(leaf, module)

    def _replace_dropout(self, clock: DropoutClock) -> None:
        """Every mask becomes a part of that of one process; weights of attention are those of this rank's heads."""
        tokens = self.tensor.share(self.positions, 0)
        for path, module in list(self.named_modules()):
            if isinstance(module, nn.Dropout):
                parent, leaf = path.rsplit(".", 1)
                setattr(self.get_submodule(parent), leaf, HashDropout(module.p, path, clock, tokens))
        for layer in self.span.layers:
            path = f"{self.family.blocks}.{layer}.{self.family.attention}"
            attention, (first_head, heads) = self.get_submodule(path), self._tensor_of(path).part(self.shape.heads)
            inner = self.family.attention_dropout
            probability = cast(float, attention.attention_dropout if inner is None else attention.get_submodule(inner).p)
            rows = torch.arange(first_head, first_head + heads, device=self.positions.device)
            attention.attention_site = HashDropout(probability, f"attention.{layer}", clock, rows)
            if inner is not None:
                setattr(attention, inner, attention.attention_site)
            self.context_axis.attach(attention, heads, self.attention_function)


def _check_buffers(section: StageSection) -> None:
    """Raises RuntimeError when transformers has buffers of which a family's torch half knows nothing: they have no values."""
    empty = [name for name, buffer in section.named_buffers() if buffer.is_meta]
    if empty:
        raise RuntimeError(f"the torch half of {section.family.model_type} has no values for {', '.join(empty)}")


def _collect(sink: Sink, parameter: Tensor) -> None:
    """Take over the gradient that autograd has just made."""
    assert parameter.grad is not None
    sink.add(parameter.grad)
    parameter.grad = None


class _NeedBefore(torch.autograd.Function):
    """Identity, behind some units; their parameters are there again when the gradient comes back."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: list[Unit], ahead: list[Unit]) -> Tensor:
        ctx.units, ctx.ahead = units, ahead
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None, None]:
        for unit in ctx.units:
            unit.need()
        for unit in ctx.ahead:
            unit.request()
        return gradient, None, None


class _ReleaseBehind(torch.autograd.Function):
    """Identity, before some units; their parameters are not needed any more when the gradient has passed them."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, units: list[Unit]) -> Tensor:
        ctx.units = units
        return x.view_as(x)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        for unit in ctx.units:
            unit.release()
        return gradient, None
