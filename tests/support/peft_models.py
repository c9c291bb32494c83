"""PEFT's own adapters, the reference of ours: a model of transformers with them, and their values in the engine's shapes."""

from typing import Any

import peft
import torch
from safetensors.torch import load_file
from torch import Tensor, nn

from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape, Weight, family_of
from hpc_mp.layout.models.adapter_weights import trained_weights
from hpc_mp.layout.models.peft_files import config_document
from hpc_mp.train.parallel.fill import Source


def theirs(weight: Weight) -> str:
    """Return PEFT's name of a factor in a model, by its own rules: parameters of experts are wrapped one after another."""
    path, _, factor = weight.name.removesuffix(".weight").rpartition(".")
    wraps = {"gate_up_proj": ".base_layer", "down_proj": ""}  # if both have adapters
    if weight.experts:
        module, _, parameter = path.rpartition(".")
        path = f"{module}{wraps[parameter]}"
    return f"base_model.model.{path}.{factor}.default.weight"


def with_peft(model: nn.Module, shape: ModelShape, spec: JobSpec, source: Source) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return a model with the adapters of a job, with the values of a source, and its parameters that are trained."""
    document = config_document(family_of(shape), shape, None)
    config = peft.LoraConfig(**{key: value for key, value in document.items() if key not in ("peft_type", "inference_mode")})
    adapted = peft.get_peft_model(model, config)  # type: ignore[arg-type]
    trained = {name: parameter for name, parameter in adapted.named_parameters() if parameter.requires_grad}
    stored = load_file(f"{spec.lora.pretrained}/adapter_model.safetensors") if spec.lora.pretrained else None
    assert {theirs(weight) for weight in trained_weights(family_of(shape), shape)} == trained.keys()
    with torch.no_grad():
        for weight in trained_weights(family_of(shape), shape):
            parameter = trained[theirs(weight)]
            if stored is not None:
                parameter.copy_(stored[theirs(weight).replace(".default", "")])
                continue
            whole = source(weight, tuple(slice(0, size) for size in weight.shape))
            if weight.experts and "lora_B" in weight.name:  # (experts, out, rank) -> (out, rank, experts)
                whole = whole.flatten(1, -2).permute(1, 2, 0)
            parameter.copy_(whole.reshape(parameter.shape))
    return adapted, trained


def from_peft(shape: ModelShape, trained: dict[str, nn.Parameter]) -> dict[str, Tensor]:
    """Return the values of PEFT's factors by the engine's names, in its shapes."""
    state = {}
    for weight in trained_weights(family_of(shape), shape):
        values = trained[theirs(weight)].detach()
        if weight.experts and "lora_B" in weight.name:
            values = values.reshape(len(values), -1, weight.shape[0]).permute(2, 0, 1)
        state[weight.name] = values.reshape(weight.shape)
    return state
