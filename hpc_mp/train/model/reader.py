"""The reader of models: it makes a model's sheet from its code in transformers, which is run once without values.

A forward on the meta device shows the order of the layers and what they get, the attentions with their windows, and which
modules stand before and behind the layers. The model's own plan of tensor parallelism says how projections are cut. What stands
between the hidden states and the logits is measured with random numbers. What does not fit is refused, with its reason, or stays
whole on every tensor rank.

    python -m hpc_mp.train.model.reader < config.json > sheet.json
"""

import json
import logging
import sys
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from functools import partial
from typing import Any, cast

import torch
import transformers
from torch import Tensor, nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean, shown
from hpc_mp.layout.models.family import Init, Weight
from hpc_mp.layout.models.reading import REFUSED
from hpc_mp.layout.models.sheet import FORMAT, NO_PLAN, Sheet

PROBE = "hpc_mp_probe"  # the name of the attention function of a reading
TOKENS = 6  # of the sample that is read
ANOTHER = "use a model of another type, or write your own as layers (hpc_mp.parallel)"
# Words of transformers' plans: dimension that is cut; None: whole inside a cut module.
CUT: Mapping[str, int | None] = {"colwise": 0, "rowwise": 1, "packed_colwise": 1, "replicated_with_grad_allreduce": None,
                                 "mla_kv_a_proj": None}
ATTENTIONS = ("full_attention", "sliding_attention")  # kinds of layers
MIXERS = ("linear_attention", "conv", "mamba")  # those that mix tokens by something else
LIMITED = ("k_", "v_", "key", "value")  # beginnings of the names of projections of key-value heads


def refused(config: Mapping[str, Any], rule: str, remedy: str = ANOTHER) -> HpcMpError:
    return HpcMpError(f"model_type = {config.get('model_type')!r}", rule, remedy)


@dataclass(frozen=True, slots=True)
class AttentionCall:
    """One call of an attention function: its module, and what it gets besides queries, keys and values."""

    module: nn.Module
    settings: Mapping[str, Any]
    tensors: tuple[str, ...]
    masked: bool


class Trace:
    """The record of a forward.

    Attributes:
        order: numbers of the layers that were called.
        faults: reasons why layers cannot be on several stages.
        tuples: True if layers return tuples.
        attentions: calls of attention functions, by layer.
        before, behind: modules beside the layers that were called before and behind them.
    """

    def __init__(self) -> None:
        self.order: list[int] = []
        self.faults: list[str] = []
        self.tuples = False
        self.attentions: dict[int, list[AttentionCall]] = {}
        self.before: list[nn.Module] = []
        self.behind: list[nn.Module] = []
        self._last: Tensor | None = None

    @contextmanager
    def of(self, base: nn.Module, layers: nn.ModuleList) -> Iterator[None]:
        """Note what layers get and return, and what is called beside them."""
        hooks = [hook for number, layer in enumerate(layers) for hook in (
            layer.register_forward_pre_hook(partial(self._begin, number), with_kwargs=True),
            layer.register_forward_hook(self._end))]
        hooks += [module.register_forward_pre_hook(self._beside) for module in base.children() if module is not layers]
        yield
        for hook in hooks:
            hook.remove()

    def _begin(self, number: int, _: nn.Module, args: tuple[Any, ...], settings: dict[str, Any]) -> None:
        hidden = args[0] if args else settings.get("hidden_states")
        others = [*args[1:], *(value for key, value in settings.items() if key != "hidden_states")]
        if self._last is not None and hidden is not self._last:
            self.faults.append(f"changes hidden states between the layers {number - 1} and {number}")
        if any(tensor.requires_grad for tensor in _tensors(others)):
            self.faults.append(f"gives layer {number} more than the hidden states of the layer before")
        self.order.append(number)

    def _beside(self, module: nn.Module, args: tuple[Any, ...]) -> None:
        calls = self.behind if self.order else self.before
        if module not in calls:
            calls.append(module)

    def _end(self, _: nn.Module, args: tuple[Any, ...], output: Any) -> None:
        self.tuples |= not isinstance(output, Tensor)
        self._last = output if isinstance(output, Tensor) else output[0]

    def attend(self, module: nn.Module, query: Tensor, key: Tensor, value: Tensor, attention_mask: Tensor | None = None,
               **settings: Any) -> tuple[Tensor, None]:
        """Take the call of an attention. Return something of the right shape."""
        used = {name: setting for name, setting in settings.items() if setting is not None}
        tensors = tuple(name for name, setting in used.items() if isinstance(setting, Tensor) and name != "position_ids")
        call = AttentionCall(module, used, tensors, attention_mask is not None)
        self.attentions.setdefault(self.order[-1] if self.order else 0, []).append(call)
        used_values = (query.sum() + key.sum()) * 0
        return value.repeat_interleave(query.shape[1] // value.shape[1], 1).transpose(1, 2) + used_values, None


def read_model(values: Mapping[str, Any]) -> Sheet:
    """Return the sheet of a causal language model. Raises HpcMpError for a model that the engine cannot divide.

    Args:
        values: its configuration, with ``model_type``.
    """
    config, trace = _config(values), Trace()
    AttentionInterface.register(PROBE, trace.attend)
    try:
        with torch.device("meta"):
            model = cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, attn_implementation=PROBE))
    except Exception as error:
        raise refused(values, f"cannot be made with an attention of ours ({_text(error)})") from None
    paths = {module: path for path, module in model.named_modules()}
    layers = _layers(model, config, values)
    embedding, head = _ends(model, values)
    blocks_path = paths[layers]
    base = model.get_submodule(blocks_path.rpartition(".")[0])
    _run(model, base, layers, trace, values)
    rotary = [paths[module] for module in trace.before if "rotary" in type(module).__name__.lower()]
    before = [paths[module] for module in trace.before if module is not embedding and paths[module] not in rotary]
    behind = [paths[module] for module in trace.behind]
    called = {*before, *behind, *rotary, blocks_path, paths[embedding]}
    idle = [path for path, module in _children(base, paths) if path not in called and any(True for _ in module.parameters())]
    if behind and behind[0] in before and any(True for _ in model.get_submodule(behind[0]).parameters()):
        raise refused(values, f"calls {behind[0]} before and behind its layers")
    if len(behind) != 1 or idle:
        raise refused(values, f"has {', '.join(behind) or 'nothing'} behind its layers, not one norm" if len(behind) != 1 else
                      f"has modules that are not called for text: {', '.join(idle)}")
    attention = _attention_path(layers, trace, values)
    plan = _plan(model, blocks_path, len(layers))
    unattended = tuple(layer for layer in range(len(layers)) if not trace.attentions.get(layer))
    others = {name for layer in unattended for name, _ in layers[layer].named_children()}
    regions, whole = _regions(layers, plan, attention, attention in others)
    tables = [_block(block, regions, plan, config, model) for block in layers]
    kinds = {table: number for number, table in enumerate(dict.fromkeys(tables))}
    tied = model.config.tie_word_embeddings and head.weight is embedding.weight
    head_path, embedding_path = paths[head], paths[embedding]
    return Sheet(
        transformers=transformers.__version__, module=type(model).__module__, architecture=type(model).__name__,
        sizes=_sizes(config, values, layers, trace, tied, embedding), dropouts=_dropouts(config),
        embedding=embedding_path, layers=blocks_path, norm_module=behind[0], head_module=head_path, rotary=tuple(rotary),
        before=tuple(before), attention=attention, regions=regions, whole=whole, unattended=unattended, tuples=trace.tuples,
        head_scale=_head_scale(model, head, values), kinds=tuple(kinds[table] for table in tables), blocks=tuple(kinds),
        embeddings=(Weight(f"{embedding_path}.weight", tuple(embedding.weight.shape), cut=0),
                    *(weight for path in before for weight in _weights(model, path))),
        norm=_weights(model, behind[0]),
        head=tuple(Weight(f"{head_path}.{name}", tuple(parameter.shape), cut=0, init="normal" if name == "weight" else "zeros")
                   for name, parameter in head.named_parameters()))


def _config(values: Mapping[str, Any]) -> PreTrainedConfig:
    kind = values["model_type"]
    if kind not in MODEL_FOR_CAUSAL_LM_MAPPING_NAMES:
        hint = did_you_mean(kind, MODEL_FOR_CAUSAL_LM_MAPPING_NAMES)
        rule = f"is no causal language model of transformers {transformers.__version__}"
        raise refused(values, rule, f"{hint} {ANOTHER}".strip())
    fields = {key: value for key, value in values.items() if key not in ("model_type", "architectures")}
    try:
        config = CONFIG_MAPPING[kind](**fields)
        keys = {*CONFIG_MAPPING[kind]().to_dict(), *config.attribute_map, *config.to_dict()}
        own = {*CONFIG_MAPPING[kind]().to_dict(), *config.attribute_map, *vars(PreTrainedConfig())}
    except Exception as error:  # transformers validates with exceptions of many kinds
        raise HpcMpError(f"model.config of model_type {kind!r}", f"is refused by transformers ({' '.join(str(error).split())})",
                         "mend that value") from None
    if unknown := sorted(key for key in fields if key not in own):
        raise HpcMpError(f"model.config.{unknown[0]}", f"is not a key of a {kind} configuration",
                         did_you_mean(unknown[0], keys - set(unknown), "leave it out"))
    config._experts_implementation = "batched_mm"  # which runs without values
    return cast(PreTrainedConfig, config)


def _layers(model: PreTrainedModel, config: PreTrainedConfig, values: Mapping[str, Any]) -> nn.ModuleList:
    """Return the one stack of layers."""
    number = getattr(config, "num_hidden_layers", None)
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number]
    if len(stacks) != 1:
        raise refused(values, f"has {len(stacks)} stacks of {number} layers, not one")
    return stacks[0]


def _ends(model: PreTrainedModel, values: Mapping[str, Any]) -> tuple[nn.Embedding, nn.Linear]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scaled = hasattr(embedding, "scalar_embed_scale") or hasattr(embedding, "embed_scale")
    if not isinstance(embedding, nn.Embedding) or (type(embedding) is not nn.Embedding and not scaled):
        raise refused(values, f"has an embedding of its own kind ({type(embedding).__name__})")
    if type(head) is not nn.Linear:
        raise refused(values, f"has a head of its own kind ({type(head).__name__})")
    return embedding, head


def _tensors(values: Any) -> Iterator[Tensor]:
    if isinstance(values, Tensor):
        yield values
    elif isinstance(values, dict):
        yield from _tensors([*values.values()])
    elif isinstance(values, list | tuple):
        for value in values:
            yield from _tensors(value)


def _run(model: PreTrainedModel, base: nn.Module, layers: nn.ModuleList, trace: Trace, values: Mapping[str, Any]) -> None:
    """Run the model without its head on the meta device."""
    hidden = torch.zeros(1, TOKENS, model.get_input_embeddings().weight.shape[1], device="meta", requires_grad=True)
    places = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    try:
        with trace.of(base, layers):
            model.base_model(inputs_embeds=hidden, position_ids=places, use_cache=False)
    except Exception as error:
        raise refused(values, f"cannot be run without values ({_text(error)})") from None
    if trace.order != [*range(len(layers))]:
        trace.faults.append(f"calls its layers in the order {shown(trace.order)}")
    calls = [call for calls in trace.attentions.values() for call in calls]
    if any(call.masked for call in calls):
        trace.faults.append("makes masks of its own")
    if extra := sorted({name for call in calls for name in call.tensors}):
        trace.faults.append(f"gives its attention {', '.join(extra)}")
    if any(not getattr(call.module, "is_causal", True) for call in calls):
        trace.faults.append("is not causal")
    if any(len(calls) > 1 for calls in trace.attentions.values()):
        trace.faults.append("has several attentions in a layer")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    if unknown := sorted({*kinds} - {*ATTENTIONS, *MIXERS}):
        trace.faults.append(f"has layers of the kind {', '.join(unknown)}")
    if own := [layer for layer, kind in enumerate(kinds) if layer not in trace.attentions and kind not in MIXERS]:
        trace.faults.append(f"computes an attention of its own in layer {own[0]}")
    if frozen := [name for name, parameter in model.named_parameters() if not parameter.requires_grad]:
        trace.faults.append(f"has parameters that are not trained: {frozen[0]}")
    if trace.faults:
        raise refused(values, trace.faults[0])


def _text(error: Exception) -> str:
    return f"{type(error).__name__}: {' '.join(str(error).split())[:200]}"


def _children(base: nn.Module, paths: Mapping[nn.Module, str]) -> Iterator[tuple[str, nn.Module]]:
    return ((paths[module], module) for module in base.children())


def _attention_path(layers: nn.ModuleList, trace: Trace, values: Mapping[str, Any]) -> str:
    """Return the path of the attention in a block."""
    paths = Counter(next(path for path, module in layers[layer].named_modules() if module is calls[0].module)
                    for layer, calls in trace.attentions.items())
    if len(paths) > 1:
        raise refused(values, f"has attentions in several places of its blocks ({', '.join(paths)})")
    return next(iter(paths), "self_attn")


def _plan(model: PreTrainedModel, blocks: str, layers: int) -> dict[str, str]:
    """Return transformers' plan of tensor parallelism inside a block: pattern of a module -> word."""
    star = f"{blocks}.*."
    return {pattern.removeprefix(star): word for pattern, word in (model.tp_plan or {}).items() if pattern.startswith(star)}


def _word(plan: Mapping[str, str], path: str) -> str | None:
    return next((word for pattern, word in plan.items() if fnmatchcase(path, pattern)), None)


def _regions(layers: nn.ModuleList, plan: Mapping[str, str], attention: str,
             mixed: bool) -> tuple[tuple[str, ...], dict[str, str]]:
    """Return the modules of a block that are cut, and those that stay whole, with the reason.

    Args:
        mixed: True if some layers have something else under the name of the attention.
    """
    children = dict.fromkeys(name for layer in layers for name, module in layer.named_children()
                             if any(True for _ in module.parameters()))
    regions, whole = [], {}
    for name in children:
        words = {word for pattern, word in plan.items() if pattern.partition(".")[0] == name}
        if not words:
            if name == attention.partition(".")[0]:
                whole[name] = NO_PLAN
        elif mixed and name == attention:
            whole[name] = "some layers have no attention there"
        elif unknown := sorted(words - CUT.keys()):
            whole[name] = f"its plan has {', '.join(unknown)}"
        elif "rowwise" not in words or ("." in attention and name == attention.partition(".")[0]):
            whole[name] = "its plan has no row projection"
        else:
            regions.append(name)
    return tuple(regions), whole


def _block(block: nn.Module, regions: Sequence[str], plan: Mapping[str, str], config: PreTrainedConfig,
           model: PreTrainedModel) -> tuple[Weight, ...]:
    """Return the weights of a block."""
    weights = []
    kv = _kv_heads(config)
    for name, parameter in block.named_parameters():
        path, _, leaf = name.rpartition(".")
        word = _word(plan, path) if name.partition(".")[0] in regions else None
        shape, init = tuple(parameter.shape), _init(model, block.get_submodule(path), leaf)
        if word == "packed_colwise":
            weights.append(Weight(name, (2, shape[0] // 2, *shape[1:]), cut=1, init=init))
        elif word == "colwise":
            limited = path.rpartition(".")[2].startswith(LIMITED) and shape[0] % kv == 0
            weights.append(Weight(name, shape, cut=0, init=init, most_parts=kv if limited else None))
        elif word == "rowwise":
            weights.append(Weight(name, shape, cut=1 if leaf == "weight" else None, init=init, row=True))
        else:
            weights.append(Weight(name, shape, init=init, partial=name.partition(".")[0] in regions))
    return tuple(weights)


def _weights(model: PreTrainedModel, path: str) -> tuple[Weight, ...]:
    """Return the weights of a module that is whole on every rank."""
    module = model.get_submodule(path)
    return tuple(Weight(f"{path}.{name}", tuple(parameter.shape),
                        init=_init(model, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]))
                 for name, parameter in module.named_parameters())


def _init(model: PreTrainedModel, module: nn.Module, leaf: str) -> Init:
    """Return how transformers sets the first values of a parameter: constants are measured."""
    parameter = getattr(module, leaf)
    if parameter.dim() > 1 or parameter.numel() > 1 << 20:
        return "normal"
    copy = type(module).__new__(type(module))
    copy.__dict__.update(vars(module))
    copy._parameters = {name: None if values is None else nn.Parameter(torch.full_like(values, 0.5, device="cpu"))
                        for name, values in module._parameters.items()}
    copy._modules = {}
    try:
        model._init_weights(copy)
        values = cast(Tensor, copy._parameters[leaf])
    except Exception:
        return "zeros"
    if bool((values == 1).all()):
        return "ones"
    return "zeros" if bool((values == 0).all()) else "normal"


def _head_scale(model: PreTrainedModel, head: nn.Linear, values: Mapping[str, Any]) -> float:
    """Return the factor between hidden states and logits besides the head's product, measured with random numbers."""
    hidden, logits, inputs = torch.randn(1, 3, head.in_features), torch.randn(1, 3, head.out_features), []

    class Result(dict[int, Tensor]):
        last_hidden_state = hidden

        def __getattr__(self, name: str) -> None:
            return None

    class Base(nn.Module):
        def forward(self, *args: Any, **settings: Any) -> Result:
            return Result({0: hidden})

    class Head(nn.Module):
        weight = head.weight

        def forward(self, x: Tensor) -> Tensor:
            inputs.append(x)
            return logits

    name, base = model.base_model_prefix, model.base_model
    path = next(path for path, module in model.named_modules() if module is head)
    try:
        setattr(model, name, Base())
        model.set_submodule(path, Head())
        result = model(input_ids=torch.zeros(1, 3, dtype=torch.long), use_cache=False).logits
    except Exception as error:
        raise refused(values, f"computes logits in a way that cannot be measured ({_text(error)})") from None
    finally:
        setattr(model, name, base)
        model.set_submodule(path, head)
    cap = getattr(model.config, "final_logit_softcapping", None)
    expected = logits if cap is None else cap * torch.tanh(logits / cap)
    inner, outer = _ratio(inputs[0], hidden), _ratio(result, expected)
    if inner is None or outer is None or (outer != 1.0 and (cap is not None or head.bias is not None)):
        raise refused(values, "computes more between the last norm and the logits than a product")
    return inner * outer


def _ratio(result: Tensor, base: Tensor) -> float | None:
    """Return the factor between two tensors; None if it is not the same everywhere."""
    factor = float((result * base).sum() / (base * base).sum())
    return None if not torch.allclose(result, base * factor, rtol=1e-4, atol=1e-5) else 1.0 if abs(factor - 1) < 1e-5 else factor


def _kv_heads(config: PreTrainedConfig) -> int:
    heads = int(getattr(config, "num_attention_heads", None) or 1)
    kv = int(getattr(config, "num_key_value_heads", None) or heads)
    return kv if heads % kv == 0 else heads


def _dropouts(config: PreTrainedConfig) -> tuple[str, ...]:
    names = (name for name in config.to_dict() if "dropout" in name or name.endswith("pdrop"))
    return tuple(name for name in names if isinstance(getattr(config, name), float))


def _sizes(config: PreTrainedConfig, values: Mapping[str, Any], layers: nn.ModuleList, trace: Trace, tied: bool,
           embedding: nn.Embedding) -> dict[str, Any]:
    """Return the numbers of a ``ModelShape``."""
    heads = getattr(config, "num_attention_heads", None) or 1
    hidden = embedding.embedding_dim
    intermediate = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    windows = [None] * len(layers)
    for layer, calls in trace.attentions.items():
        windows[layer] = calls[0].settings.get("sliding_window")
    return {
        "model_type": values["model_type"], "layers": len(layers), "hidden": hidden, "heads": heads,
        "kv_heads": _kv_heads(config),
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "intermediate": int(intermediate if not isinstance(intermediate, list) else max(intermediate)),
        "vocabulary": embedding.num_embeddings, "positions": int(getattr(config, "max_position_embeddings", None) or 2**31 - 1),
        "tied": bool(tied), "attention_bias": False, "mlp_bias": False, "gated_mlp": True,
        "initializer_range": float(getattr(config, "initializer_range", None) or 0.02),
        "windows": windows if any(windows) else []}


def main() -> int:
    logging.getLogger("transformers").setLevel(logging.ERROR)
    try:
        sys.stdout.write(FORMAT.dump_json(read_model(json.load(sys.stdin))).decode())
    except HpcMpError as error:
        sys.stdout.write(json.dumps([error.value, error.rule, error.remedy]))
        return REFUSED
    return 0


if __name__ == "__main__":
    sys.exit(main())
