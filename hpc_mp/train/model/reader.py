"""The reader of models: it makes a model's sheet from its code in transformers, which is run once without values.

A forward on the meta device shows the order of the layers and what they get, the attentions with their windows, and which
modules stand before and behind the layers (``forward_trace``). The model's own plan of tensor parallelism says how projections
are cut (``read_blocks``). What stands between the hidden states and the logits is measured with random numbers (``measured``).
What does not fit is refused, with its reason, or stays whole on every tensor rank.

    python -m hpc_mp.train.model.reader < config.json > sheet.json
"""

import copy
import json
import logging
import sys
from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any, cast

import torch
import transformers
from torch import nn
from transformers import AttentionInterface, AutoModelForCausalLM, PreTrainedConfig, PreTrainedModel
from transformers.models.auto.configuration_auto import CONFIG_MAPPING
from transformers.models.auto.modeling_auto import MODEL_FOR_CAUSAL_LM_MAPPING_NAMES

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean, shown
from hpc_mp.layout.models.family import ATTENTION_DROPOUT, Weight
from hpc_mp.layout.models.reading import REFUSED
from hpc_mp.layout.models.sheet import FORMAT, Sheet
from hpc_mp.train.model.forward_trace import SINKS, TOKENS, ForwardTrace, is_rotary
from hpc_mp.train.model.measured import Unmeasured, first_value, head_scale, text_of
from hpc_mp.train.model.read_blocks import Division, StoredNames, divide, stored_values, weights_of

PROBE = "hpc_mp_probe"  # the name of the attention function of a reading
ANOTHER = "use a model of another type, or write your own as layers (hpc_mp.parallel)"
ATTENTIONS = ("full_attention", "sliding_attention", "chunked_attention")  # kinds of layers
# Types whose layers compute attention in their own code, by scores to which they add a mask of all tokens, and its module.
OWN_ATTENTION = {"bloom": "self_attention", "falcon": "self_attention", "gpt_neo": "attn.attention"}
MIXERS = ("linear_attention", "conv", "mamba")  # those that mix tokens by something else


def refused(config: Mapping[str, Any], rule: str, remedy: str = ANOTHER) -> HpcMpError:
    return HpcMpError(f"model_type = {config.get('model_type')!r}", rule, remedy)


def read_model(values: Mapping[str, Any]) -> Sheet:
    """Return the sheet of a causal language model. Raises HpcMpError for a model that the engine cannot divide.

    Args:
        values: its configuration, with ``model_type``.
    """
    try:
        return _read(values)
    except HpcMpError:
        raise
    except Unmeasured as reason:
        raise refused(values, str(reason)) from None
    except Exception as error:  # code of transformers, which may be of any kind
        raise refused(values, f"cannot be read ({text_of(error)})") from error


def _read(values: Mapping[str, Any]) -> Sheet:
    config, trace = _config(values), ForwardTrace()
    model = _model(config, trace, values)
    paths = {module: path for path, module in model.named_modules()}
    layers = _layers(model, config, values)
    embedding, head = _ends(model, values)
    blocks_path = paths[layers]
    base = model.get_submodule(blocks_path.rpartition(".")[0])
    _run(model, layers, trace, values)
    _check(model, layers, trace, values)
    rotary = [paths[module] for module in trace.before if is_rotary(module)]
    before = [paths[module] for module in trace.before if module is not embedding and paths[module] not in rotary]
    behind = [paths[module] for module in trace.behind]
    called = {*before, *behind, *rotary, blocks_path, paths[embedding]}
    idle = [paths[module] for module in base.children()
            if paths[module] not in called and any(True for _ in module.parameters())]
    if behind and behind[0] in before and any(True for _ in model.get_submodule(behind[0]).parameters()):
        raise refused(values, f"calls {behind[0]} before and behind its layers")
    if len(behind) != 1 or idle:
        raise refused(values, f"has {', '.join(behind) or 'nothing'} behind its layers, not one norm" if len(behind) != 1 else
                      f"has modules that are not called for text: {', '.join(idle)}")
    attention = _attention_path(layers, trace, values)
    division = divide(model, layers, blocks_path, attention, trace, config)
    names = StoredNames(model)
    tables = [tuple(weights_of(block, paths[block], division, model, names)) for block in layers]
    kinds = {table: number for number, table in enumerate(dict.fromkeys(tables))}
    tied = model.config.tie_word_embeddings and head.weight is embedding.weight
    head_path, embedding_path = paths[head], paths[embedding]
    embeddings = stored((Weight(f"{embedding_path}.weight", tuple(embedding.weight.shape), cut=0),
                         *(weight for path in before for weight in _weights(model, path))), names)
    norm = stored(_weights(model, behind[0]), names)
    heads = stored((Weight(f"{head_path}.{name}", tuple(parameter.shape), cut=0, init="normal" if name == "weight" else "zeros")
                    for name, parameter in head.named_parameters()), names)
    if strange := [weight.name for weight in (*embeddings, *norm, *(weight for table in kinds for weight in table))
                   if not weight.trained and weight.init == "normal"]:
        raise refused(values, f"has {strange[0]}, which is not trained, and does not begin with a constant")
    scale = head_scale(model, head, blocks_path.rpartition(".")[0])
    counted = "its layers count the tokens that they get" if trace.counted else ""
    own = config.model_type in OWN_ATTENTION
    sinks = any(SINKS in call.tensors for calls in trace.attentions.values() for call in calls)
    return Sheet(
        transformers=transformers.__version__, module=type(model).__module__, architecture=type(model).__name__,
        sizes=_sizes(config, values, layers, trace, tied, embedding, division), dropouts=_dropouts(config),
        embedding=embedding_path, layers=blocks_path, norm_module=behind[0], head_module=head_path, rotary=tuple(rotary),
        before=tuple(before), attention=attention, regions=division.regions, whole=dict(division.whole),
        experts=division.experts.path, router=division.experts.router,
        apart=max((division.apart(table) for table in kinds), key=len),
        unattended=tuple(layer for layer in range(len(layers)) if layer not in trace.attentions and not own), tuples=trace.tuples,
        needs_samples="its attention has sinks" if sinks else "attention is computed by its own code" if own else counted,
        needs_tokens=f"its layers get {', '.join(trace.placed)} for them" if trace.placed else "",
        own_attention=own, selected=dict(division.selected), drops_by=_drops_by(config, values),
        dropout=max((getattr(config, name) for name in _dropouts(config)), default=0.0),
        head_scale=scale, kinds=tuple(kinds[table] for table in tables), blocks=tuple(kinds), embeddings=embeddings, norm=norm,
        head=heads)


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


def _model(config: PreTrainedConfig, trace: ForwardTrace, values: Mapping[str, Any]) -> PreTrainedModel:
    """Return the model without values, with an attention that a trace takes if it is not the model's own."""
    attention = "eager" if config.model_type in OWN_ATTENTION else PROBE
    AttentionInterface.register(PROBE, trace.attend)
    try:
        with torch.device("meta"):
            return cast(PreTrainedModel, AutoModelForCausalLM.from_config(config, attn_implementation=attention))
    except Exception as error:
        raise refused(values, f"cannot be made with an attention of ours ({text_of(error)})") from None


def _layers(model: PreTrainedModel, config: PreTrainedConfig, values: Mapping[str, Any]) -> nn.ModuleList:
    """Return the one stack of layers."""
    number = getattr(config, "num_hidden_layers", None)
    stacks = [module for module in model.modules() if isinstance(module, nn.ModuleList) and len(module) == number
              and not any(map(is_rotary, module))]
    if number is None:
        raise refused(values, "has no num_hidden_layers of its own: it is more than a model of text")
    if len(stacks) != 1:
        raise refused(values, f"has {len(stacks) or 'no'} stack{'s' * bool(stacks)} of {number} layers, not one")
    return stacks[0]


def _ends(model: PreTrainedModel, values: Mapping[str, Any]) -> tuple[nn.Embedding, nn.Linear]:
    embedding, head = model.get_input_embeddings(), model.get_output_embeddings()
    scaled = hasattr(embedding, "scalar_embed_scale") or hasattr(embedding, "embed_scale")
    if not isinstance(embedding, nn.Embedding) or (type(embedding) is not nn.Embedding and not scaled):
        raise refused(values, f"has an embedding of its own kind ({type(embedding).__name__})")
    if isinstance(head, nn.Linear) and head.out_features != embedding.num_embeddings:
        raise refused(values, f"embeds {embedding.num_embeddings} words and has logits of {head.out_features}")
    if type(head) is not nn.Linear:
        raise refused(values, f"has a head of its own kind ({type(head).__name__})")
    return embedding, head


def _run(model: PreTrainedModel, layers: nn.ModuleList, trace: ForwardTrace, values: Mapping[str, Any]) -> None:
    """Run the model without its head on the meta device."""
    path = next(path for path, module in model.named_modules() if module is layers)
    hidden = torch.zeros(1, TOKENS, model.get_input_embeddings().weight.shape[1], device="meta", requires_grad=True)
    places = torch.zeros(1, TOKENS, dtype=torch.long, device="meta")
    # Without a mask, the masks of an attention of its own would depend on the values of positions.
    mask = torch.ones(1, TOKENS, dtype=torch.long, device="meta") if model.config.model_type in OWN_ATTENTION else None
    try:
        with trace.of(model.get_submodule(path.rpartition(".")[0]), layers):
            model.get_submodule(path.partition(".")[0])(
                inputs_embeds=hidden, position_ids=places, attention_mask=mask, use_cache=False)
    except Exception as error:
        raise refused(values, f"cannot be run without values ({text_of(error)})") from None


def _check(model: PreTrainedModel, layers: nn.ModuleList, trace: ForwardTrace, values: Mapping[str, Any]) -> None:
    """Raise HpcMpError for a model that stages cannot compute by themselves."""
    faults = trace.faults
    if trace.order != [*range(len(layers))]:
        faults.append(f"calls its layers in the order {shown(trace.order)}")
    calls = [call for calls in trace.attentions.values() for call in calls]
    if any(call.masked for call in calls):
        faults.append("makes masks of its own")
    if extra := sorted({name for call in calls for name in call.tensors if name != SINKS}):
        faults.append(f"gives its attention {', '.join(extra)}")
    if any(not getattr(call.module, "is_causal", True) for call in calls):
        faults.append("is not causal")
    if any(len(calls) > 1 for calls in trace.attentions.values()):
        faults.append("has several attentions in a layer")
    kinds = getattr(model.config, "layer_types", None) or ["full_attention"] * len(layers)
    if unknown := sorted({*kinds} - {*ATTENTIONS, *MIXERS}):
        faults.append(f"has layers of the kind {', '.join(unknown)}")
    own = [layer for layer, kind in enumerate(kinds) if layer not in trace.attentions and kind not in MIXERS]
    if own and model.config.model_type not in OWN_ATTENTION:
        faults.append(f"computes an attention of its own in layer {own[0]}")
    if own and not trace.added_masks:
        faults.append(f"adds more than a mask to the scores of layer {own[0]}")
    if noise := [name for name in trace.drawn if name not in trace.dropped]:
        faults.append(f"draws random numbers in training ({noise[0].partition('.')[0]}), which would differ between layouts")
    if getattr(model.config, "slow_but_exact", False) and model.config.pretraining_tp > 1:
        faults.append("computes products in pieces (slow_but_exact)")
    if whole := [name for name, stored, _ in stored_values(model) if not stored.is_floating_point()]:
        faults.append(f"has {whole[0]}, which is no floating-point number")
    if faults:
        raise refused(values, faults[0])


def _attention_path(layers: nn.ModuleList, trace: ForwardTrace, values: Mapping[str, Any]) -> str:
    """Return the path of the attention in a block."""
    if values["model_type"] in OWN_ATTENTION:
        return OWN_ATTENTION[values["model_type"]]
    paths = Counter(next(path for path, module in layers[layer].named_modules() if module is calls[0].module)
                    for layer, calls in trace.attentions.items())
    if len(paths) > 1:
        raise refused(values, f"has attentions in several places of its blocks ({', '.join(paths)})")
    return next(iter(paths), "self_attn")


def _weights(model: PreTrainedModel, path: str) -> tuple[Weight, ...]:
    """Return the weights of a module that is whole on every rank."""
    module = model.get_submodule(path)
    return tuple(Weight(f"{path}.{name}", tuple(stored.shape), trained=trained,
                        init=first_value(model, module.get_submodule(name.rpartition(".")[0]), name.rpartition(".")[2]))
                 for name, stored, trained in stored_values(module))


def stored(weights: Iterable[Weight], names: StoredNames) -> tuple[Weight, ...]:
    """Return weights beside the layers with their places in checkpoints."""
    return tuple(replace(weight, stored=names.of(weight.name, weight.shape)) for weight in weights)


def _drops_by(config: PreTrainedConfig, values: Mapping[str, Any]) -> str:
    """Return the operation by which a model drops elements outside of modules of dropout, whatever its probabilities are now;
    empty if it does not."""
    names = _dropouts(config)
    if not names or config.model_type in OWN_ATTENTION:
        return "an attention of its own" if names else ""
    dropping, trace = copy.deepcopy(config), ForwardTrace()
    for name in names:
        setattr(dropping, name, 0.5 if name.startswith(ATTENTION_DROPOUT) else 0.25)
    model = _model(dropping, trace, values)
    _run(model, _layers(model, dropping, values), trace, values)
    if any(call.settings.get("dropout") == 0.25 for calls in trace.attentions.values() for call in calls):
        return "a dropout of attention weights that is not named so"
    return next((name.partition(".")[0] for name in trace.dropped), "")


def _dropouts(config: PreTrainedConfig) -> tuple[str, ...]:
    names = (name for name in config.to_dict() if "dropout" in name or name.endswith("pdrop"))
    return tuple(name for name in names if isinstance(getattr(config, name), float))


def _sizes(config: PreTrainedConfig, values: Mapping[str, Any], layers: nn.ModuleList, trace: ForwardTrace, tied: bool,
           embedding: nn.Embedding, division: Division) -> dict[str, Any]:
    """Return the numbers of a ``ModelShape``."""
    heads = getattr(config, "num_attention_heads", None) or 1
    hidden, experts = embedding.embedding_dim, division.experts
    intermediate = getattr(config, "intermediate_size", None) or getattr(config, "ffn_dim", None) or 4 * hidden
    windows = [None] * len(layers)
    for layer, calls in trace.attentions.items():
        windows[layer] = calls[0].settings.get("sliding_window")
    kinds = getattr(config, "layer_types", None) or ()
    if chunked := "chunked_attention" in kinds:
        if any(windows):
            raise refused(values, "has windows and chunks")
        windows = [config.attention_chunk_size if kind == "chunked_attention" else None for kind in kinds]
    return {
        "model_type": values["model_type"], "layers": len(layers), "hidden": hidden, "heads": heads,
        "kv_heads": division.kv_heads,
        "head_dim": int(getattr(config, "head_dim", None) or hidden // heads),
        "intermediate": int(intermediate if not isinstance(intermediate, list) else max(intermediate)),
        "vocabulary": embedding.num_embeddings, "positions": int(getattr(config, "max_position_embeddings", None) or 2**31 - 1),
        "tied": bool(tied), "attention_bias": False, "mlp_bias": False, "gated_mlp": True,
        "initializer_range": float(getattr(config, "initializer_range", None) or 0.02),
        "windows": windows if any(windows) else [], "chunked": chunked,
        "experts": experts.count, "experts_per_token": experts.choices, "expert_intermediate": experts.intermediate,
        "dense": list(experts.dense)}


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
