"""The division of a block over tensor and expert ranks, by transformers' plan of tensor parallelism, and by ours for types that
have none. A word that is not known leaves its module whole, with the reason."""

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from fnmatch import fnmatchcase
from typing import Any, cast

from torch import Tensor, nn
from transformers import PreTrainedConfig, PreTrainedModel
from transformers.conversion_mapping import get_model_conversion_mapping
from transformers.core_model_loading import PrefixChange, WeightConverter

from hpc_mp.layout.models.family import StoredPart, Weight
from hpc_mp.layout.models.sheet import CUT_WITH, NO_PLAN
from hpc_mp.train.model.forward_trace import ForwardTrace
from hpc_mp.train.model.measured import Unmeasured, first_value

# Words of transformers' plans: dimension that is cut; None: whole inside a cut module.
CUT: Mapping[str, int | None] = {
    "colwise": 0, "rowwise": 1, "packed_colwise": 1, "replicated_with_grad_allreduce": None, "mla_kv_a_proj": None,
    "local_params": None, "moe_tp_experts": None}
LIMITED = ("k_", "v_", "key", "value")  # beginnings of the names of projections of key-value heads
# Gate and up projection side by side, which transformers gathers before it splits them: ours are cut inside both.
SPLIT = {"gate_up_proj": "colwise_gather_output", "down_proj": "rowwise_split_input"}



def _plan(rows: str, columns: str, whole: str = "") -> dict[str, str]:
    """Return a plan, given patterns of the projections whose inputs and of those whose outputs are cut, and of what is whole in a
    cut module, so that each rank has a share of its gradient. The first pattern that matches counts."""
    words = {"rowwise": rows, "colwise": columns, "local_params": whole}
    return {pattern: word for word, patterns in words.items() for pattern in patterns.split()}


NORMED = ("olmo2", "olmo3", "olmoe", "flex_olmo")  # types with norms of all heads at once
LATENT = ("axk1", "deepseek_v3", "sarvam_mla", "youtu")  # types whose heads have a part of a product of two matrices
DENSE = _plan("mlp.dense_4h_to_h", "mlp.dense_h_to_4h")
PLANS: Mapping[str, Mapping[str, str]] = {  # of modules for which transformers has no plan, or gathers what it cuts
    "gpt_oss": _plan("self_attn.o_proj mlp.experts.down_proj", "self_attn.?_proj self_attn.sinks mlp.experts.gate_up_proj"),
    "aria_text": _plan("mlp.*down_proj", "mlp.*gate_proj mlp.*up_proj"),
    **dict.fromkeys(LATENT, _plan("self_attn.o_proj", "self_attn.q_proj self_attn.*_b_proj")),
    **dict.fromkeys(("opt", "biogpt"), _plan("self_attn.out_proj fc2", "self_attn.?_proj fc1")),
    **dict.fromkeys(("bloom", "falcon"), _plan("self_attention.dense", "self_attention.query_key_value") | DENSE),
    "persimmon": _plan("self_attn.dense", "self_attn.query_key_value") | DENSE,
    "gpt_neo": _plan("attn.attention.out_proj mlp.c_proj", "attn.attention.?_proj mlp.c_fc"),
    "gpt_bigcode": _plan("attn.c_proj mlp.c_proj", "attn.c_attn mlp.c_fc"),
    # Whole: rows of q, v and k are in four groups, whatever the number of heads.
    "codegen": _plan("mlp.fc_out", "mlp.fc_in", "attn.qkv_proj attn.out_proj"),
    "phi3": _plan("self_attn.o_proj", "", "self_attn.qkv_proj"),
    **dict.fromkeys(NORMED, _plan("self_attn.o_proj", "self_attn.v_proj", "self_attn.?_proj")),
}
SELECTED: Mapping[str, Mapping[str, str]] = {  # as in ``Family``
    "falcon": {"self_attention.query_key_value": "groups"},
    "gpt_bigcode": {"attn.c_attn": "groups"},
    "phi3": {"self_attn.qkv_proj": "query key value"},
    **{kind: {"self_attn.q_norm": "query", "self_attn.k_norm": "key"} for kind in NORMED},
}


@dataclass(frozen=True, slots=True)
class ExpertsRead:
    """The experts of a model.

    Attributes:
        path: of their module in a block; None: they stay as transformers computes them, on every rank.
        router: the module beside them that chooses; empty if it does not return logits, weights and choices.
        count, choices, intermediate: their number, experts of a token, and the inner size of each.
        dense: layers without experts.
    """

    path: str | None = None
    router: str = ""
    count: int = 0
    choices: int = 0
    intermediate: int = 0
    dense: tuple[int, ...] = ()


@dataclass(frozen=True, slots=True)
class Division:
    """The division of a block."""

    regions: tuple[str, ...]  # modules of a block that tensor ranks cut as a whole
    whole: Mapping[str, str]  # module of a block -> the reason why it is not cut
    plan: Mapping[str, str]  # pattern of a module or parameter in a block -> word
    experts: ExpertsRead
    selected: Mapping[str, str]  # as in Family
    kv_heads: int  # of the model

    def word(self, name: str) -> str | None:
        """Return the word of a parameter, or of the module that has it."""
        for path in (name, name.rpartition(".")[0]):
            word = next((word for pattern, word in self.plan.items() if fnmatchcase(path, pattern)), None)
            leaf = path.rpartition(".")[2]
            if word is not None:
                return {"colwise_gather_output": "packed_colwise", "rowwise_split_input": "rowwise"}[word] if (
                    SPLIT.get(leaf) == word) else word
        return None

    def cuts(self, name: str) -> bool:
        """Return True if a parameter is cut in a region."""
        return name.rpartition(".")[0] == self.experts.path or CUT.get(self.word(name) or "") is not None

    def apart(self, weights: tuple[Weight, ...]) -> tuple[str, ...]:
        """Return the modules with cut weights beside the experts, and these; empty for a block without experts."""
        path = self.experts.path
        if path is None or not any(weight.experts for weight in weights):
            return ()
        region = path.partition(".")[0]
        inner = [weight.name.rpartition(".")[0] for weight in weights
                 if weight.cut is not None and not weight.experts and weight.name.startswith(f"{region}.")]
        return path, *dict.fromkeys(name.rpartition(".")[0] for name in inner)


def divide(model: PreTrainedModel, layers: nn.ModuleList, blocks: str, attention: str, trace: ForwardTrace,
           config: PreTrainedConfig) -> Division:
    """Return how ranks divide the blocks of a model. ``attention``: its path in a block."""
    experts = _experts(layers, trace)
    star = f"{blocks}.*."
    theirs = {pattern.removeprefix(star): word for pattern, word in (model.tp_plan or {}).items() if pattern.startswith(star)}
    plan = dict(PLANS.get(config.model_type, {}))
    ours = {pattern.partition(".")[0] for pattern in plan}
    plan |= {pattern: word for pattern, word in theirs.items() if pattern.partition(".")[0] not in ours}
    others = {name for layer, block in enumerate(layers) if trace.attentions and layer not in trace.attentions
              for name, _ in block.named_children()}
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    kv = int(getattr(config, "num_key_value_heads", None) or getattr(config, "num_kv_heads", None) or heads)
    if hasattr(config, "multi_query") and not getattr(config, "new_decoder_architecture", False):
        kv = 1 if config.multi_query else heads
    kv_heads = kv if heads % kv == 0 else heads
    division = Division((), {}, plan, experts, SELECTED.get(config.model_type, {}), kv_heads)
    children = dict.fromkeys(name for block in layers for name, module in block.named_children()
                             if any(True for _ in module.parameters()))
    reasons = {name: _kept_whole(name, layers, division, attention, name in others, trace) for name in children}
    return replace(division, regions=tuple(name for name, reason in reasons.items() if reason is None),
                   whole={name: reason for name, reason in reasons.items() if reason})


def _kept_whole(name: str, layers: nn.ModuleList, division: Division, attention: str, mixed: bool,
                trace: ForwardTrace) -> str | None:
    """Return the reason why a module of blocks is not cut; empty if nothing would cut it; None if it is cut.

    Args:
        mixed: True if some layers without attention have a module of that name.
    """
    patterns = [pattern for pattern in division.plan if pattern.partition(".")[0] == name]
    words = {division.word(pattern) or "" for pattern in patterns}
    if not words:
        return NO_PLAN if name == attention.partition(".")[0] else ""
    if mixed and name == attention:
        return "some layers have no attention there"
    if unknown := sorted(words - CUT.keys()):
        return f"its plan has {', '.join(unknown)}"
    if name in (*CUT_WITH, *CUT_WITH.values()):
        return None
    inside = attention if name == attention.partition(".")[0] else name
    if not any(division.word(pattern) == "rowwise" and pattern.startswith(f"{inside}.") for pattern in patterns):
        return "its plan has no row projection"
    blocks = [dict(block.get_submodule(name).named_parameters(name)) for block in layers if hasattr(block, name)]
    if not all(any(division.cuts(path) for path in block) for block in blocks):
        return "its plan cuts it in some layers only"
    shapes = {(path, values.shape) for block in blocks for path, values in block.items()}
    if name == attention and len(shapes) > len({path for path, _ in shapes}):
        return "its layers have different sizes"
    experts = division.experts.path
    inner = {f"{name}.{path}": parameter for block in layers if hasattr(block, name)
             for path, parameter in block.get_submodule(name).named_parameters()}
    if any((parameter.dim() > 2 or any(map(str.isdigit, path.split(".")))) and path.rpartition(".")[0] != experts
           for path, parameter in inner.items()):
        return "its experts have a form of their own"
    beside = [f"{name}.{path}" for layer in trace.experts if experts is not None and experts.startswith(f"{name}.")
              for path, _ in layers[layer].get_submodule(name).named_parameters()]
    if any(path.count(".") == 2 and path.rpartition(".")[0] != experts and CUT[division.word(path) or "local_params"] is not None
           for path in beside):
        return "it has projections beside its experts"
    return None


def _experts(layers: nn.ModuleList, trace: ForwardTrace) -> ExpertsRead:
    """Return the experts of a model, if the engine can compute them: gated MLPs that lie side by side in two parameters."""
    calls = trace.experts
    modules = [call.module for call in calls.values()]
    paths = {next(path for path, module in layers[layer].named_modules() if module is call.module)
             for layer, call in calls.items()}
    if len(paths) != 1 or not all(map(_gated, modules)):
        return ExpertsRead()
    sizes = {(*cast(Tensor, module.gate_up_proj).shape, 2 if module.is_transposed else 1, call.choices)
             for module, call in zip(modules, calls.values(), strict=True)}
    (count, *sides, columns, choices), path = next(iter(sizes)), next(iter(paths))
    if len(sizes) != 1 or not choices or "." not in path:
        return ExpertsRead()
    parent = layers[min(calls)].get_submodule(path.rpartition(".")[0])
    router = next((name for name, module in parent.named_children() if module in trace.routers), "")
    dense = tuple(layer for layer in range(len(layers)) if layer not in calls)
    return ExpertsRead(path, router, count, choices, sides[columns - 1] // 2, dense)


def _gated(module: Any) -> bool:
    """Return True for experts that multiply an activated gate with another half, column by column."""
    names, matrices = {name for name, _ in module.named_parameters()}, {"gate_up_proj", "down_proj"}
    return module.has_gate and not getattr(module, "has_post_expert_norm", False) and (
        names == matrices | ({f"{name}_bias" for name in matrices} if module.has_bias else set()))


class StoredNames:
    """The names under which transformers saves a model's weights, as it was published.

    Attributes:
        converters: of tensors that a checkpoint has otherwise; their ends are those of the model's weights.
    """

    def __init__(self, model: PreTrainedModel) -> None:
        changes = [change for change in get_model_conversion_mapping(model, add_legacy=False)
                   if not isinstance(change, PrefixChange)]
        self.converters = [change for change in changes if isinstance(change, WeightConverter)]
        self._back = [change.reverse_transform() for change in reversed(changes)]

    def of(self, name: str, shape: tuple[int, ...]) -> tuple[StoredPart, ...]:
        """Return the places of a weight in a checkpoint; empty if it is stored under its own name.

        Raises:
            Unmeasured: it is stored in another form than this code knows.
        """
        if experts := tuple((at, self._renamed(part)) for at, part in _of_experts(name, shape, self.converters)):
            return experts
        if any(change.rename_source_key(name)[1] for change in self._back if isinstance(change, WeightConverter)):
            raise Unmeasured(f"stores {name} in another form than it has")
        renamed = self._renamed(name)
        return () if renamed == name else (((), renamed),)

    def _renamed(self, name: str) -> str:
        for change in self._back:
            if not isinstance(change, WeightConverter):
                name = change.rename_source_key(name)[0]
        return name


def _of_experts(name: str, shape: tuple[int, ...], converters: list[WeightConverter]) -> Iterator[StoredPart]:
    """Yield the places of experts in a checkpoint that stores each projection of each expert by itself."""
    for converter in converters:
        targets, sources = (list(patterns) for patterns in (converter.target_patterns, converter.source_patterns))
        target = targets[0].replace("\\.", ".")
        plain = [source.replace("\\.", ".") for source in sources]
        kinds = [type(operation).__name__ for operation in converter.operations]
        halves = 2 if len(shape) == 4 else 1
        if len(targets) == 1 and name.endswith(target) and len(plain) == halves and all(
                source.count(".*.") == 1 and not re.search(r"[\[\](){}|?+^$\\]", source) for source in plain) and (
                kinds == ["MergeModulelist", "Concatenate"][:halves]):
            before = name.removesuffix(target)
            for expert in range(shape[0]):
                for half, source in enumerate(plain):
                    yield (expert, half)[:halves], before + source.replace("*", str(expert))
            return


def weights_of(block: nn.Module, path: str, division: Division, model: PreTrainedModel, names: StoredNames) -> Iterator[Weight]:
    """Yield the weights of a block at a path. Raises Unmeasured as ``StoredNames``."""
    number = path.rpartition(".")[2]
    for weight in _weights_of(block, division, model):
        stored = names.of(f"{path}.{weight.name}", weight.shape)
        yield replace(weight, stored=tuple((at, name.replace(f".{number}.", ".{}.", 1)) for at, name in stored))


def _weights_of(block: nn.Module, division: Division, model: PreTrainedModel) -> Iterator[Weight]:
    experts = division.experts.path
    sparse = experts is not None and any(name.startswith(f"{experts}.") for name, _ in block.named_parameters())
    for name, values, trained in stored_values(block):
        path, _, leaf = name.rpartition(".")
        region = name.partition(".")[0] in division.regions
        word = division.word(name) if region else None
        shape, init = tuple(values.shape), first_value(model, block.get_submodule(path), leaf)
        if experts is not None and path == experts:
            yield _of_expert(name, leaf, shape, block.get_submodule(path))
        elif word == "packed_colwise":
            yield Weight(name, (2, shape[0] // 2, *shape[1:]), cut=1, init=init)
        elif word == "colwise":
            limited = (path.rpartition(".")[2].startswith(LIMITED) or path in division.selected) and (
                shape[0] % division.kv_heads == 0)
            yield Weight(name, shape, cut=0, init=init, most_parts=division.kv_heads if limited else None)
        elif word == "rowwise":
            yield Weight(name, shape, cut=1 if leaf == "weight" else None, init=init, row=True)
        else:  # beside experts every rank computes it in full
            apart = sparse and experts is not None and name.partition(".")[0] == experts.partition(".")[0]
            yield Weight(name, shape, init=init, partial=region and trained and not apart, trained=trained)


def _of_expert(name: str, leaf: str, shape: tuple[int, ...], module: Any) -> Weight:
    """Return a parameter of experts. A bias of outputs is added once, to the sum over tensor ranks."""
    outputs, both, bias = len(shape) - 1 if module.is_transposed else 1, leaf.startswith("gate_up"), leaf.endswith("_bias")
    weight = Weight(name, shape, experts=True, transposed=module.is_transposed, init="zeros" if bias else "normal")
    if not both:
        return replace(weight, row=True, partial=True) if bias else replace(weight, cut=3 - outputs)
    if not module.is_concatenated:
        return replace(weight, cut=outputs, together=2)
    return replace(weight, shape=(*shape[:outputs], 2, shape[outputs] // 2, *shape[outputs + 1:]), cut=outputs + 1)


def stored_values(module: nn.Module) -> Iterator[tuple[str, Tensor, bool]]:
    """Yield the names and values that a checkpoint has of a module, and whether they are trained."""
    buffers = module.state_dict().keys()
    for name, parameter in module.named_parameters():
        yield name, parameter, parameter.requires_grad
    for name, buffer in module.named_buffers():
        if name in buffers:
            yield name, buffer, False
