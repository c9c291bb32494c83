"""Adapters in the format of PEFT (github.com/huggingface/peft): its names, its configuration and its files. No torch.

A directory has ``adapter_config.json`` and ``adapter_model.safetensors``. The factors of a projection have its name in the model
behind ``base_model.model.``. Those of an experts' parameter belong to the module of the experts. If several of its parameters
have adapters, PEFT wraps the module once for each, and each wrap but the outermost adds ``base_layer`` to the name; the outermost
is of the last parameter. Their A is (experts × rank, in), their B (out, rank × experts), with the experts innermost.
"""

import json
from collections.abc import Mapping
from dataclasses import replace
from math import prod
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.layout.models.adapter_weights import ALL, DOWN, UP, adapted_weights, head_beside, trained_weights
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.shape import ModelShape
from hpc_mp.layout.models.weight_files import FLOATING, stored_in

CONFIG, WEIGHTS = "adapter_config.json", "adapter_model.safetensors"
PREFIX, WRAPPED = "base_model.model.", "base_layer"
# Fields of a configuration that are read here, or have no effect on what stored adapters compute. All others must be unset.
READ = ("peft_type", "r", "lora_alpha", "use_rslora", "target_modules", "target_parameters", "init_lora_weights",
        "modules_to_save")
NEUTRAL = ("auto_mapping", "base_model_name_or_path", "corda_config", "ensure_weight_tying", "eva_config", "exclude_modules",
           "fan_in_fan_out", "inference_mode", "layers_pattern", "layers_to_transform", "loftq_config",
           "lora_dropout", "lora_ga_config", "megatron_config", "megatron_core", "peft_version", "qalora_group_size", "revision",
           "task_type", "runtime_config")
KEEPS_BASE = (True, False, "gaussian", "eva", "orthogonal")  # first values; those of other methods change the model's weights too
OF_EXPERTS = (".gate_proj", ".up_proj", ".down_proj")  # ends of module names that PEFT translates to parameters of experts
SAVE = "save LoRA adapters with PEFT's save_pretrained, of this model and without these settings"


def stored_names(family: Family, shape: ModelShape) -> dict[str, str]:
    """Return the name in PEFT's file of each factor of a model's adapters, and of each weight of its new head."""
    adapted = adapted_weights(family, shape)
    wraps: dict[str, list[str]] = {}  # module of experts -> its parameters with adapters
    for target, (weight, *_) in adapted.items():
        if weight.experts:
            wraps.setdefault(target.rpartition(".")[0], []).append(target)
    names = {}
    for target, (_, *factors) in adapted.items():
        module = target.rpartition(".")[0]
        wrapped = wraps.get(module, [])
        path = ".".join([module, *[WRAPPED] * (len(wrapped) - 1 - wrapped.index(target))]) if target in wrapped else target
        for factor, kind in zip(factors, (DOWN, UP), strict=True):
            names[factor.name] = f"{PREFIX}{path}.{kind}.weight"
    return names | {weight.name: f"{PREFIX}{weight.name}" for weight in head_beside(family, shape)}


def stored_shape(factor: Weight) -> tuple[int, ...]:
    """Return the shape of a factor in PEFT's file: a matrix; or of a weight of a head."""
    if not factor.experts:
        return _matrix(factor.shape) if len(factor.shape) > 1 else factor.shape
    experts, *rest = factor.shape
    if factor.name.endswith(f"{DOWN}.weight"):
        return experts * rest[0], rest[1]
    outputs, rank = _matrix(tuple(rest))
    return outputs, rank * experts


def _matrix(shape: tuple[int, ...]) -> tuple[int, int]:
    return prod(shape[:-1]), shape[-1]


def experts_last(factor: Weight) -> bool:
    """Return True if a factor's first dimension, that of experts, is the last one in PEFT's file."""
    return factor.experts and factor.name.endswith(f"{UP}.weight")


def config_document(family: Family, shape: ModelShape, base: str | None) -> dict[str, Any]:
    """Return the configuration of a model's adapters. ``base``: directory of the model.

    Raises:
        HpcMpError: PEFT would take a dense MLP of a model with experts for these.
    """
    adapters = shape.adapters
    assert adapters is not None
    possible, chosen = _by_kind(family, replace(shape, adapters=ALL)), _by_kind(family, shape)
    if shape.experts and (taken := [name for name in chosen[False] if name.endswith(OF_EXPERTS)]):
        raise HpcMpError(
            f"an adapter of {taken[0]}", "has no place in PEFT's format: in a model with experts PEFT takes that name for the "
            "experts", "export the merged model, or train with lora.modules that leave it out")
    return {
        "peft_type": "LORA", "task_type": "SEQ_CLS" if shape.classes else "CAUSAL_LM",
        "base_model_name_or_path": base, "inference_mode": True,
        "r": adapters.rank, "lora_alpha": int(adapters.alpha) if adapters.alpha == int(adapters.alpha) else adapters.alpha,
        "use_rslora": adapters.rslora, "lora_dropout": adapters.dropout, "bias": "none",
        "fan_in_fan_out": family.transposed, "init_lora_weights": True,
        "target_modules": _shortest(chosen[False], possible[False]),
        "target_parameters": _shortest(chosen[True], possible[True], 3) or None,
        "modules_to_save": [pattern.rpartition(".")[0].rpartition(".")[2] for pattern in family.fresh] or None,
    }


def _by_kind(family: Family, shape: ModelShape) -> dict[bool, list[str]]:
    """Return the names of what has adapters: projections (False), and parameters of experts (True)."""
    kinds: dict[bool, list[str]] = {False: [], True: []}
    for target, (weight, *_) in adapted_weights(family, shape).items():
        kinds[weight.experts].append(target)
    return kinds


def _shortest(chosen: list[str], possible: list[str], words: int = 1) -> list[str]:
    """Return the last words of names if these choose the same among all possible names, else the whole names."""
    ends = sorted({".".join(name.split(".")[-words:]) for name in chosen})
    same = {name for name in possible if any(name.endswith(f".{end}") for end in ends)} == set(chosen)
    return ends if same else sorted(chosen)


def stored_adapters(directory: Path, family: Family, shape: ModelShape, dropout: float) -> Adapters:
    """Return the adapters in a directory of PEFT's. Raises HpcMpError if they are not adapters of this model."""
    config, value = _config(directory), f"lora.pretrained = {directory}"
    parameters = config.get("target_parameters") or []
    if not (directory / WEIGHTS).exists():
        raise HpcMpError(value, f"holds no {WEIGHTS}", SAVE)
    held = stored_in(directory / WEIGHTS, "lora.pretrained")
    weights = {target: weight for target, (weight, *_) in adapted_weights(family, replace(shape, adapters=ALL)).items()}
    chosen = tuple(target for target, weight in weights.items() if (
        any(f".{target}".endswith(f".{name}") for name in parameters) if weight.experts else
        f"{PREFIX}{target}.{DOWN}.weight" in held))
    adapters = Adapters(config["r"], config["lora_alpha"], chosen, dropout, bool(config.get("use_rslora")))
    adapted = replace(shape, adapters=adapters)
    names = stored_names(family, adapted)
    if odd := sorted({*names.values()} ^ held.keys()):
        lacks = odd[0] not in held
        raise HpcMpError(value, f"{'lacks' if lacks else 'holds'} {odd[0]}" + (
            "" if lacks else f", which is no factor of an adapter of a {family.model_type} block"), SAVE)
    factors = {factor.name: factor for factor in trained_weights(family, adapted)}
    for name, stored in names.items():
        if held[stored].shape != (shape_there := stored_shape(factors[name])) or held[stored].dtype not in FLOATING:
            raise HpcMpError(
                f"{value}: {stored}", f"is {held[stored].dtype} of shape {held[stored].shape}, but the model requires plain "
                f"numbers of shape {shape_there}", "use the adapters of this model")
    return adapters


def _config(directory: Path) -> Mapping[str, Any]:
    """Return the configuration in a directory. Raises HpcMpError if it cannot be read, or means something else than LoRA."""
    value = f"lora.pretrained = {directory}"
    try:
        config: dict[str, Any] = json.loads((directory / CONFIG).read_text(encoding="utf-8"))
        whole = isinstance(config, dict) and type(config["r"]) is int and config["r"] > 0 and config["lora_alpha"] > 0
    except OSError as error:
        raise HpcMpError(value, f"its {CONFIG} cannot be read ({error.strerror})", SAVE) from None
    except (ValueError, RecursionError, KeyError, TypeError) as error:
        raise HpcMpError(value, f"its {CONFIG} is not one of LoRA ({type(error).__name__}: {error})", SAVE) from None
    first = config.get("init_lora_weights", True) if whole else None
    settings = {name: setting for name, setting in config.items() if name not in (*READ, *NEUTRAL) and setting not in (
        None, False, "none", {}, [])} if whole else {}
    if not whole or config.get("peft_type") != "LORA" or first not in KEEPS_BASE:
        raise HpcMpError(value, f"its {CONFIG} is not one of plain LoRA (peft_type, r, lora_alpha, init_lora_weights)", SAVE)
    for name, setting in settings.items():
        raise HpcMpError(value, f"its {CONFIG} has {name} = {shown(setting)}, which is not supported", SAVE)
    return config
