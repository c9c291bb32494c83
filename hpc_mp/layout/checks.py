"""The check that a model can be divided as a layout requires. Messages name the keys of the job file."""

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, shown
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import Family, ModelShape, chunk_sizes, family_of
from hpc_mp.layout.models.adapter_weights import adapted_weights, targets
from hpc_mp.layout.models.adapters import chooses
from hpc_mp.layout.models.tensor import head_counts, matches, tensor_modules
from hpc_mp.layout.schedule import most_stages
from hpc_mp.layout.schedule.names import AT
from hpc_mp.layout.schedule_of import check_schedule
from hpc_mp.layout.stages import Partition, cut_at


def check_layout(layout: Layout, shape: ModelShape, partition: Partition) -> None:
    """Raise HpcMpError, with the arithmetic, if the model cannot be divided as the layout requires."""
    family = family_of(shape)
    _check_stages(layout, shape, partition.method)
    _check_tensor(layout, family, shape)
    _check_experts(layout, shape)
    _check_attention(layout, family, shape)
    _check_adapters(family, shape)


def _check_adapters(family: Family, shape: ModelShape) -> None:
    """Check that every pattern chooses something, and that the inputs of experts are not dropped."""
    adapters = shape.adapters
    if adapters is None:
        return
    names = targets(family, shape)
    for pattern in adapters.modules:
        if not any(chooses(pattern, name) for name in names):
            inner = dict.fromkeys(family.without_layer(name)[0].partition("{}.")[2] for name in names)
            raise HpcMpError(
                f"lora.modules = {shown(list(adapters.modules))}", f"matches no projection of a block with {shown(pattern)}",
                f"they are {', '.join(inner)}; embedding, head, norms and routers keep their values")
    experts = [name for name, (weight, *_) in adapted_weights(family, shape).items() if weight.experts]
    if experts and adapters.dropout:
        raise HpcMpError(f"lora.dropout = {adapters.dropout:g}", f"is not supported for {experts[0]}, a parameter of experts",
                         "set dropout = 0, or name modules without it")


def _check_stages(layout: Layout, shape: ModelShape, requested: str | tuple[int, ...]) -> None:
    pipeline, stages = layout.degrees.pipeline, layout.stages
    if layout.sequence > shape.positions:
        raise HpcMpError(f"data.sequence_length = {layout.sequence}", f"is longer than the model's {shape.positions} positions",
                         f"use at most {shape.positions}, or a model with more positions")
    if stages > most_stages(shape.layers):
        product = "" if stages == pipeline else f" × {stages // pipeline} stages per rank ({layout.schedule}) = {stages}"
        raise HpcMpError(f"parallel.pipeline = {pipeline}{product}",
                         f"is more stages than the model's {shape.layers} layers, the embedding and the head can fill",
                         f"use at most {most_stages(shape.layers)} stages")
    check_schedule(layout)
    if isinstance(requested, tuple) and sum(requested) != shape.layers:
        raise HpcMpError(f"parallel.partition = {shown(requested)}",
                         f"has {sum(requested)} layers, but the model has {shape.layers}",
                         "change the layers of a stage so that the sum is right")
    if isinstance(requested, str) and requested.startswith(AT):
        cut_at(requested, shape, stages)


def _check_experts(layout: Layout, shape: ModelShape) -> None:
    """Check that every expert rank has experts."""
    ranks = layout.degrees.expert
    if ranks == 1:
        return
    if not shape.experts:
        raise HpcMpError(f"parallel.expert = {ranks}", f"has nothing to share out: {shape.model_type} has no experts",
                         "set parallel.expert = 1")
    sizes = chunk_sizes(shape.experts, ranks)
    if empty := sizes.count(0):
        largest = max(degree for degree in range(1, ranks) if 0 not in chunk_sizes(shape.experts, degree))
        raise HpcMpError(f"parallel.expert = {ranks}", f"cuts the {shape.experts} experts of a block into pieces of "
                         f"{sizes[0]}, so that {empty} ranks of a group get none",
                         f"use {largest}, or another number with an expert for every rank")


def _check_tensor(layout: Layout, family: Family, shape: ModelShape) -> None:
    tensor, patterns, context = layout.degrees.tensor, layout.tensor_modules, layout.degrees.context
    if tensor == 1:
        return
    modules = tensor_modules(family, shape)
    idle = [pattern for pattern in patterns if not any(matches(module, [pattern]) for module in modules)]
    if idle or not patterns:
        names = dict.fromkeys(family.without_layer(name)[0].format("*") for name in modules)
        raise HpcMpError(f"parallel.tensor_modules = {shown(list(patterns))}", "matches no module that can be cut" + (
            f" with {shown(idle[0])}" if idle else ""), f"the modules are {', '.join(names)}")
    if 0 in head_counts(family, shape, layout.tensor_cut()):
        raise HpcMpError(f"parallel.tensor = {tensor}", f"is more than the model's {counted(shape.heads, 'attention head')}",
                         f"use at most {shape.heads}: heads are never split; or leave attentions out of parallel.tensor_modules")
    sizes = chunk_sizes(layout.sequence // context, tensor)
    if layout.sequence_parallel and (empty := sizes.count(0)):
        divided = f" / parallel.context({context}) = {sum(sizes)}" if context > 1 else ""
        raise HpcMpError(f"data.sequence_length = {layout.sequence}{divided}",
                         f"is cut over tensor({tensor}) ranks into pieces of {sizes[0]}, and {empty} of them get no token",
                         "use fewer tensor ranks, or parallel.sequence = false")


def _check_attention(layout: Layout, family: Family, shape: ModelShape) -> None:
    """Check that what mixes tokens supports the tokens of ``context`` and of sequence-parallel ranks."""
    context = layout.degrees.context
    mixed = f"layer {min(family.unattended)} mixes tokens by something else than attention" if family.unattended else ""
    for key, used, needs in (
            (f"parallel.context = {context}", context > 1, family.needs_samples),
            ("parallel.sequence = true", layout.sequence_parallel and layout.degrees.tensor > 1, family.needs_tokens)):
        if used and (reason := mixed or needs):
            raise HpcMpError(key, f"gives each rank only some of the tokens, but of a {shape.model_type} model {reason}",
                             "leave it out")
    if context == 1:
        return
    if layout.context_method != "ulysses":
        if shape.bidirectional:
            raise HpcMpError(f"parallel.context_method = {shown(layout.context_method)}",
                             f"is causal attention, but tokens of a {shape.model_type} model attend to later ones too",
                             'use context_method = "ulysses"')
        return
    counts = head_counts(family, shape, layout.tensor_cut())
    if context > (heads := min(counts)):
        raise HpcMpError(f"parallel.context = {context}", f"is more than the {counted(heads, 'head')} of a rank, heads("
                         f"{shape.heads}) / tensor({len(counts)}), which ulysses shares out",
                         f'use at most {heads}, or context_method = "ring"')
