"""The construction of a stage: changes of Hugging Face's modules, in this order.

============== ===================================================================================================================
embedding      on the first stage: cut along the vocabulary, with its further lookups and the modules behind it
blocks         the layers of the stage, without values
tensor         column and row projections in place of linear ones; gradients of shared inputs are summed
experts        this rank's experts in place of all experts, and the losses of routers
head           on the last stage: the last norm, the head and the loss, cut along the vocabulary
dropout        masks that are the same on every layout
attention      this rank's heads, and the attention to tokens of other context ranks
compilation    of blocks
driver         the model's own forward, in which layers of other stages return their input
============== ===================================================================================================================
"""

from collections.abc import Callable
from functools import partial
from typing import TYPE_CHECKING, cast

import torch
from torch import Tensor, nn

from hpc_mp.layout.flat import StageSpan, blocks_together
from hpc_mp.train.model.causal_stage import CausalStage
from hpc_mp.train.model.compilation import as_it_is, compile_block, compiled
from hpc_mp.train.model.layers import LayerCall, LayerGroup, Nothing, RotaryTables, change_before, cut_heads, passed
from hpc_mp.train.model.logits import LogitsObjective
from hpc_mp.train.model.recompute import groups_of
from hpc_mp.train.model.vocabulary import NextToken, VocabularyEmbedding
from hpc_mp.train.parallel.capacity import Intake
from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.experts import Experts
from hpc_mp.train.parallel.projection import Projection, TensorAxis
from hpc_mp.train.parallel.surroundings import Surroundings

if TYPE_CHECKING:  # a rank imports transformers after its rendezvous
    from hpc_mp.train.model.causal_model import CausalModel


def build_stage(model: "CausalModel", span: StageSpan, around: Surroundings) -> CausalStage:
    """Build a stage without parameters, which ``adopt`` gives it."""
    whole = model.skeleton()
    blocks = [f"{model.family.blocks}.{layer}" for layer in span.layers]
    stage = CausalStage(model.family, model.shape, span, list(groups_of(blocks, around.recompute)), around)
    for apply in (_embedding, _blocks, _tensor, _experts, _head, _dropout, _attention, _compilation, _driver):
        apply(stage, model, whole, around)
    _check_buffers(stage)
    return stage


def _tensor_of(model: "CausalModel", path: str, around: Surroundings) -> TensorAxis:
    """Return the tensor axis for the module at a path, which may be whole on every rank."""
    module = model.family.module_of(model.shape, f"{path}.weight")
    return around.tensor if around.tensor.cut.cuts(module) else around.tensor.alone


def _embedding(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    family = model.family
    if not stage.span.first:
        return
    name = f"{family.embedding}.weight"
    stage.graft(family.embedding, VocabularyEmbedding(
        name, model.shape.vocabulary, model.padding.get(name), model.embedding_scale(whole), around.tensor,
        _tensor_of(model, family.embedding, around)))
    for path in (*family.lookups, *family.behind_embedding):
        stage.graft(path, whole.get_submodule(path))


def _blocks(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    for layer in stage.span.layers:
        stage.graft(f"{model.family.blocks}.{layer}", model.block(whole, layer))


def _tensor(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    family, shape = model.family, model.shape
    names = {weight.name for layer in stage.span.layers for weight in family.layer_weights(shape, layer)}
    for layer, path in zip(stage.span.layers, stage_blocks(stage), strict=True):
        block = stage.get_submodule(path)
        for inner, weight in family.projections(shape, layer).items():
            bias = f"{path}.{inner}.bias" if f"{path}.{inner}.bias" in names else None
            parent, leaf = inner.rsplit(".", 1)
            tensor = _tensor_of(model, f"{path}.{inner}", around)
            projection = Projection(f"{path}.{inner}.weight", bias, family.transposed, weight.row, tensor)
            setattr(block.get_submodule(parent), leaf, projection)
            behind_attention = family.block_module(inner) == family.block_module(family.attention)
            if weight.row and behind_attention and tensor.size == 1:
                change_before(projection, partial(around.tensor.share, dim=1))  # attention has all tokens
        for inner in family.enters:
            if _tensor_of(model, f"{path}.{inner}", around).size > 1:
                change_before(block.get_submodule(inner), around.tensor.enter)
            elif inner == family.attention:
                change_before(block.get_submodule(inner), around.tensor.all_tokens)


def _experts(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    """Replace the experts. Each rank has a share of the output of router and experts, which their parent module sums."""
    family, count = model.family, model.shape.experts
    if family.experts is None:
        return
    parent, leaf = family.experts.rsplit(".", 1)
    for path in stage_blocks(stage):
        module, tensor = stage.get_submodule(f"{path}.{parent}"), _tensor_of(model, f"{path}.{parent}", around)
        if not hasattr(module, leaf):
            continue  # a dense layer between those with experts
        activation = cast(nn.Module, module.get_submodule(leaf).act_fn)
        positions = stage.positions if tensor.size > 1 else around.tensor.share(stage.positions, 0)
        others = around.tensor.sharers if tensor.size == 1 else ()
        sharers = [around.context.axis, *others]
        counts = bool(others) or around.tensor.rank == 0
        intake = Intake(around.capacity, around.context.sequence, positions, sharers, counts)
        setattr(module, leaf, Experts(f"{path}.{family.experts}", count, activation, tensor, around.experts, intake))
        if tensor.rank == 0:  # their gradients of the router are shares: one rank adds the loss
            around.router_loss.attach(module.get_submodule(family.router), count, sharers, counts)
        if tensor.size > 1:
            module.register_forward_hook(lambda _, inputs, output, tensor=tensor: tensor.leave(output.clone()))


def _head(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    family = model.family
    if not stage.span.last:
        return
    stage.graft(family.norm, whole.get_submodule(family.norm))
    name = family.head_module(model.shape)
    bias = next((weight.name for weight in family.head_weights(model.shape) if len(weight.shape) == 1), None)
    head = Projection(f"{name}.weight", bias, transposed=False, row=False, tensor=_tensor_of(model, name, around))
    if model.loss is not None:
        stage.objective = LogitsObjective(head, model.shape.vocabulary, model.logit_cap, model.loss)
        return
    wrap = compiled if around.compile else as_it_is
    stage.objective = NextToken(head, model.shape.vocabulary, around.tensor, model.logit_cap, wrap)


def _dropout(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    tokens = around.tensor.share(stage.positions, 0)
    for path, module in list(stage.named_modules()):
        if isinstance(module, nn.Dropout):
            parent, leaf = path.rsplit(".", 1)
            setattr(stage.get_submodule(parent), leaf, HashDropout(module.p, path, around.clock, tokens))


def _attention(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    """Attach this rank's heads, their dropout, and the context axis to attention modules."""
    family, shape = model.family, model.shape
    for layer in stage.span.layers:
        path = f"{family.blocks}.{layer}.{family.attention}"
        attention, tensor = stage.get_submodule(path), _tensor_of(model, path, around)
        if tensor.size > 1:
            cut_heads(attention, shape.hidden, shape.heads, shape.kv_heads, tensor.size)
        first_head, heads = tensor.part(shape.heads)
        inner = family.attention_dropout
        probability = cast(float, attention.attention_dropout if inner is None else attention.get_submodule(inner).p)
        rows = torch.arange(first_head, first_head + heads, device=stage.positions.device)
        site = HashDropout(probability, f"attention.{layer}", around.clock, rows)
        attention.attention_site = site
        if inner is not None:
            setattr(attention, inner, site)
        around.context.attach(attention, heads, model.attention_function)


def _compilation(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    for path in stage_blocks(stage) if around.compile else ():
        compile_block(stage.get_submodule(path))


def _driver(stage: CausalStage, model: "CausalModel", whole: nn.Module, around: Surroundings) -> None:
    family, again = model.family, blocks_together(around.recompute) is not None
    calls: list[Callable[..., Tensor]] = [passed] * model.shape.layers
    for number, paths in enumerate(stage.groups):
        group = LayerGroup(stage, number, paths, again)
        for path in paths:
            calls[int(path.rpartition(".")[2])] = LayerCall(group, path, stage.get_submodule(path))
    replaced: dict[str, nn.Module] = {path: Nothing() for path in family.lookups}
    replaced |= {path: nn.Identity() for path in (*family.behind_embedding, family.norm)}  # the stage calls them itself
    if family.rotary is not None:
        with around.precision.computing():
            rotary = type(whole.get_submodule(family.rotary))(model.config)
        stage.rotary.append(RotaryTables(rotary, stage.whole_samples, around.context.sequence))
        replaced[family.rotary] = stage.rotary[0]
    stage.driver = model.driver(whole, calls, replaced)


def stage_blocks(stage: CausalStage) -> list[str]:
    """Return the paths of a stage's layers."""
    return [path for paths in stage.groups for path in paths]


def _check_buffers(stage: CausalStage) -> None:
    """Raise RuntimeError if a block has buffers without values."""
    empty = [name for name, buffer in stage.named_buffers() if buffer.is_meta]
    if empty:
        raise RuntimeError(f"{stage.family.model_type}: nothing gives values to {', '.join(empty)}")
