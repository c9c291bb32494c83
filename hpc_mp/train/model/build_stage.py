"""The construction of a stage: changes of Hugging Face's modules, one after another."""

import copy
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from functools import partial
from typing import cast

import torch
from torch import Tensor, nn
from transformers import PreTrainedModel

from hpc_mp.layout.flat import StageSpan
from hpc_mp.layout.models.adapter_weights import DOWN, adapted_weights
from hpc_mp.layout.models.tensor import heads_of, part_of, selected_heads
from hpc_mp.train.model.attention_table import attention_function
from hpc_mp.train.model.compilation import compile_block
from hpc_mp.train.model.encoder_decoder import EncoderDecoderStage, join_stacks
from hpc_mp.train.model.rotary_tables import RotaryTables
from hpc_mp.train.model.transformers_modules import TransformersModules
from hpc_mp.train.model.transformers_stage import Absent, TransformersStage
from hpc_mp.train.model.vocabulary import LogitsObjective, NextToken, SampleClass, VocabularyEmbedding
from hpc_mp.train.parallel.adapter import Adapter, InputDropout
from hpc_mp.train.parallel.capacity import Intake
from hpc_mp.train.parallel.dropout import HashDropout
from hpc_mp.train.parallel.experts import ExpertProjection, Experts
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.projection import Projection, TensorAxis, change_flat, change_input, change_output
from hpc_mp.train.parallel.surroundings import Surroundings

UNSET = -987654321.0  # in buffers without values


def build_stage(model: TransformersModules, span: StageSpan, around: Surroundings) -> TransformersStage:
    """Build a stage without parameters, which ``adopt`` gives it."""
    whole, stacks = model.skeleton(), model.family.decoder is not None
    stage = (EncoderDecoderStage if stacks else TransformersStage)(model.family, model.shape, span, around)
    for path, layer in zip(stage.blocks, span.layers, strict=True):
        stage.graft(path, model.block(whole, layer))
    one = _experts, _head, _dropout, _adapters, _attention, _buffers, _compilation, _driver
    for change in (_embedding, _tensor, *((_head, join_stacks) if stacks else one)):
        change(stage, model, whole)
    return stage


def _tensor_of(stage: TransformersStage, path: str) -> TensorAxis:
    """Return the tensor axis for the module at a path, which may be whole on every rank."""
    module = stage.family.module_of(stage.shape, f"{path}.weight")
    return stage.tensor if stage.tensor.cut.cuts(module) else stage.tensor.alone


def _embedding(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach the embedding to the first stage, cut along the vocabulary, with its further lookups and the modules behind it."""
    family = model.family
    if not stage.span.first:
        return
    embedding = cast(nn.Embedding, whole.get_submodule(family.embedding))
    stage.graft(family.embedding, VocabularyEmbedding(
        f"{family.embedding}.weight", model.shape.vocabulary, embedding.padding_idx, *embedding_scale(embedding), stage.tensor,
        _tensor_of(stage, family.embedding)))
    for path in (*family.lookups, *family.behind_embedding):
        stage.graft(path, whole.get_submodule(path))


def embedding_scale(embedding: nn.Module) -> tuple[float, bool]:
    """Return the factor by which an embedding of transformers multiplies hidden states, and whether it is first rounded to their
    format."""
    scale = getattr(embedding, "scalar_embed_scale", None)
    return (float(getattr(embedding, "embed_scale", 1.0)), False) if scale is None else (float(scale), True)


def _tensor(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Put column and row projections in place of linear ones; sum gradients of shared inputs."""
    family, present = model.family, {path for path, _ in stage.named_modules()}
    for layer, block in zip(stage.span.layers, stage.blocks, strict=True):
        names = {weight.name for weight in family.layer_weights(model.shape, layer)}
        for inner, weight in family.projections(model.shape, layer).items():
            path = f"{block}.{inner}"
            bias = f"{path}.bias" if f"{path}.bias" in names else None
            projection = Projection(f"{path}.weight", bias, family.transposed, weight.row, _tensor_of(stage, path))
            stage.set_submodule(path, projection)
            behind_attention = family.block_module(inner) == family.block_module(family.attention)
            if weight.row and behind_attention and projection.tensor.size == 1 < stage.tensor.size:
                change_input(projection, partial(stage.tensor.share, dim=1))  # attention has all tokens
        for inner in family.entered(model.shape, layer):
            path = f"{block}.{inner}"
            if path not in present or inner == family.experts:
                continue  # layers of other kinds; experts are entered where they are made
            if inner in family.apart:
                if _tensor_of(stage, path).size > 1:
                    change_flat(stage.get_submodule(path), stage.tensor.enter, stage.around.capacity.samples)
            elif isinstance(stage.get_submodule(path), Projection):  # of an MLP that is no module
                for name in (inner, *(name for name, other in family.cut_with.items() if other == inner)):
                    change: Callable[[Tensor], Tensor] = _tensor_of(stage, path).enter if name == inner else nn.Identity()
                    change_flat(stage.get_submodule(f"{block}.{name}"), change, stage.around.capacity.samples)
            elif _tensor_of(stage, path).size > 1:
                change_input(stage.get_submodule(path), stage.tensor.enter)
            elif inner == family.attention and stage.tensor.size > 1:
                change_input(stage.get_submodule(path), stage.tensor.all_tokens)
                if inner in family.whole:
                    change_output(stage.get_submodule(path), partial(stage.tensor.share, dim=1))


def _experts(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Replace the experts. Each rank has a share of their output. It is summed behind them, or behind their parent module if
    that is cut as a whole: then each rank has a share of the router's gradient too."""
    family, count, around = model.family, model.shape.experts, stage.around
    if family.experts is None:
        return
    parent, leaf = family.experts.rsplit(".", 1)
    present = {path for path, _ in stage.named_modules()}
    for path in (path for path in stage.blocks if f"{path}.{family.experts}" in present):
        module, tensor = stage.get_submodule(f"{path}.{parent}"), _tensor_of(stage, f"{path}.{parent}")
        positions = stage.positions if tensor.size > 1 else stage.tensor.share(stage.positions, 0)
        sharers, counts = _sharers(stage, tensor.size == 1)
        intake = Intake(around.capacity, stage.context.sequence, positions, sharers, counts)
        experts = Experts(f"{path}.{family.experts}", count, module.get_submodule(leaf), tensor, around.experts, intake)
        setattr(module, leaf, experts)
        if family.router and (family.apart or tensor.rank == 0):  # one rank adds the loss to gradients that are shares
            sharers, counts = _sharers(stage, tensor.size == 1 or bool(family.apart))
            around.router_loss.attach(module.get_submodule(family.router), count, sharers, counts)
        if tensor.size > 1 and family.apart:
            experts.enter_by(tensor, around.capacity.samples)
        elif tensor.size > 1:
            module.register_forward_hook(lambda _, inputs, output, tensor=tensor: tensor.leave(output.clone()))


def _sharers(stage: TransformersStage, own: bool) -> tuple[list[Axis], bool]:
    """Return the axes whose ranks have other tokens of the same samples, and whether this rank reports what it computes of them.
    ``own``: True if a rank has only its own tokens, as between cut layers."""
    others = stage.tensor.sharers if own else ()
    return [stage.context.axis, *others], bool(others) or stage.tensor.rank == 0


def _head(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach the last norm, the head and the loss to the last stage, cut along the vocabulary. A pooler of first tokens gets each
    token as the first of a sample."""
    family, classes = model.family, model.shape.classes
    if not stage.span.last:
        return
    if family.head.startswith(f"{family.norm}."):
        whole.set_submodule(family.head, nn.Identity())
    for path in (family.norm, *family.behind_norm):
        stage.graft(path, whole.get_submodule(path))
    if family.first_token:
        change_input(stage.get_submodule(family.norm), lambda hidden: hidden.unsqueeze(1))  # all tokens as first ones
    if classes and getattr(model.config, "classifier_pooling", None) == "mean":
        change_input(stage.get_submodule(family.behind_norm[0]), stage.mean_of_row)
    vocabulary = classes or model.shape.vocabulary
    name, cap = family.head_module(model.shape), None if classes else getattr(model.config, "final_logit_softcapping", None)
    bias = next((weight.name for weight in family.head_weights(model.shape) if len(weight.shape) == 1), None)
    head = Projection(f"{name}.weight", bias, transposed=False, row=False, tensor=_tensor_of(stage, name))
    if model.loss is None:
        around = stage.around
        objective = SampleClass if classes else NextToken
        stage.objective = objective(head, vocabulary, stage.tensor, cap, around.compile, around.loss_terms)
    else:
        stage.objective = LogitsObjective(head, vocabulary, cap, model.loss)


def _dropout(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Drop with masks that are the same on every layout."""
    tokens, attention = stage.tensor.share(stage.positions, 0), model.family.attention
    whole_attentions = tuple(f"{block}.{attention}." for block in stage.blocks if attention in model.family.whole)
    for path, module in list(stage.named_modules()):
        if isinstance(module, nn.Dropout):
            rows = stage.positions if path.startswith(whole_attentions) else tokens  # attention has all tokens
            stage.set_submodule(path, HashDropout(module.p, path, stage.around.clock, rows, 1 + (path == model.family.twice)))


def _adapters(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach the model's adapters to projections and experts."""
    adapters, adapted = model.shape.adapters, adapted_weights(model.family, model.shape)
    if adapters is None:
        return
    tokens = stage.positions
    own = stage.tensor.share(tokens, 0)
    for module in list(stage.modules()):
        if isinstance(module, ExpertProjection) and module.name in adapted:
            _, *factors = adapted[module.name]
            pair = (ExpertProjection(factor.name, module.last, module.tensor) for factor in factors)
            module.adapter = Adapter(adapters.scale, nn.Identity(), *pair)
        elif isinstance(module, Projection) and (target := module.names[0].removesuffix(".weight")) in adapted:
            _, *factors = adapted[target]
            down = factors[0]
            projections = [Projection(factor.name, None, transposed=False, row=False, tensor=module.tensor) for factor in factors]
            for projection in projections:
                projection.last = module.row
            first = part_of(model.family, model.shape, down, module.tensor.cut).box[-1].start
            dropout = InputDropout(adapters.dropout, f"{target}.{DOWN}", stage.around.clock, tokens, own, first, down.shape[-1])
            module.adapter = Adapter(adapters.scale, dropout, *projections)


def _attention(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Attach this rank's heads, their dropout, and the context axis to attention modules."""
    family, shape = model.family, model.shape
    for block, layer in zip(stage.blocks, stage.span.layers, strict=True):
        if layer in family.unattended:
            continue
        path = f"{block}.{family.attention}"
        attention, tensor = stage.get_submodule(path), _tensor_of(stage, path)
        own = heads_of(shape.heads, shape.kv_heads, tensor.size, tensor.rank)
        heads, kv_heads = len(own.query), len(own.kv)
        width = shape.hidden // shape.heads * heads
        numbers = {**dict.fromkeys(("split_size", *(("embed_dim",) if family.selected else ())), width),
                   "num_key_value_groups": heads // kv_heads,
                   **dict.fromkeys(("num_attention_heads", "num_heads"), heads),
                   **dict.fromkeys(("num_key_value_heads", "num_kv_heads"), kv_heads)}
        for name, value in numbers.items() if tensor.size > 1 else ():
            if hasattr(attention, name):  # a module has some of these numbers
                setattr(attention, name, value)
        for module, order in family.selected.items() if tensor.size > 1 else ():
            vars(attention)["config"] = config = copy.copy(model.config)  # the model's other modules share the original
            config.num_attention_heads = heads
            if chosen := selected_heads(order, own, shape.heads, shape.kv_heads):
                change_output(stage.get_submodule(f"{block}.{module}"), partial(_of_heads, *chosen))
        stage.queries[block] = own.query
        inner = family.attention_dropout
        probability = family.attention_probability(model.config) if inner is None else cast(
            float, attention.get_submodule(inner).p)
        rows = torch.arange(own.query.start, own.query.stop, device=stage.positions.device)
        site = HashDropout(probability, f"attention.{layer}", stage.around.clock, rows)
        attention.attention_site = site
        if inner is not None:
            setattr(attention, inner, site)
        stage.context.attach(attention, own, attention_function)


def _of_heads(count: int, chosen: Sequence[int], states: Tensor) -> Tensor:
    """Return the chosen heads of so many."""
    return states.unflatten(-1, (count, -1))[..., chosen, :].flatten(-2)


def _buffers(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Give values to buffers that no checkpoint has, as transformers does it for a model that was made without any."""
    device = stage.positions.device
    stored = {weight.name for weight in model.family.all_weights(model.shape) if not weight.trained}
    for path, module in stage.named_modules():
        empty = {name: buffer for name, buffer in module._buffers.items()
                 if buffer is not None and buffer.is_meta and f"{path}.{name}" not in stored}
        for name, buffer in empty.items():
            module._buffers[name] = torch.full_like(buffer, UNSET if buffer.is_floating_point() else 0, device=device)
        if empty:
            with stage.precision.computing():
                cast(PreTrainedModel, whole)._init_weights(module)
                if _unset(module, empty):  # values that its constructor sets
                    with suppress(TypeError):
                        module._buffers |= {name: buffer.to(device) for name, buffer in type(module)().named_buffers()}
        if unset := _unset(module, empty):
            raise RuntimeError(f"{model.family.model_type}: nothing gives values to {path}.{unset[0]}")


def _unset(module: nn.Module, names: Iterable[str]) -> list[str]:
    return [name for name in names if bool((cast(Tensor, module._buffers[name]) == UNSET).any())]


def _compilation(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Compile blocks, with the exchanges of the context axis outside of their graphs, and the last norm."""
    if not stage.around.compile:
        return
    if stage.span.last:
        compile_block(stage.get_submodule(model.family.norm))
    for path in stage.blocks:
        if stage.context.axis.size > 1:
            attention = stage.get_submodule(f"{path}.{model.family.attention}")
            attention.context = torch.compiler.disable(attention.context)
        compile_block(stage.get_submodule(path))


def _driver(stage: TransformersStage, model: TransformersModules, whole: nn.Module) -> None:
    """Let the model's own forward drive. Around the layers it calls the stage's modules, or nothing."""
    family = model.family
    ends = {path: stage.span.first for path in (*family.lookups, *family.behind_embedding)}
    ends[family.norm] = stage.span.last or ends.get(family.norm, False)
    replaced = {path: stage.get_submodule(path) if held else Absent() for path, held in ends.items()}
    for path in family.rotary:
        empty = whole.get_submodule(path)
        with stage.precision.computing():
            rotary = type(empty)(getattr(empty, "config", model.config))  # several may have frequencies of their own
        replaced[path] = tables = RotaryTables(rotary, stage.whole_samples, stage.context.sequence)
        stage.rotary.append(tables)
    for path, module in replaced.items():
        whole.set_submodule(path, module)
    path, _, name = family.blocks.rpartition(".")
    parent, base = whole.get_submodule(path), whole.get_submodule(family.base)
    for module in (parent, base):
        module.config = model.config
    vars(parent)[name] = stage.layer_calls(cast(nn.ModuleList, parent._modules.pop(name)))
    stage.driver = lambda **arguments: cast(Tensor, getattr(base(**arguments, use_cache=False), family.output))
