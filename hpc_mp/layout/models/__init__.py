"""Model families as torch-free tables, and the checks that need only a model's shape."""

from __future__ import annotations

from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.job import JobSpec
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.gpt2 import GPT2
from hpc_mp.layout.models.llama import LLAMA
from hpc_mp.layout.models.qwen2 import QWEN2
from hpc_mp.layout.models.shape import LayerCosts, ModelShape, check_layout, chunk_sizes, layer_costs, read_config, stage_layers
from hpc_mp.layout.models.weight_files import check_weights

__all__ = [
    "FAMILIES", "Family", "LayerCosts", "ModelShape", "Weight", "check_layout", "check_pretrained", "chunk_sizes", "family_of",
    "layer_costs", "read_config", "read_shape", "stage_layers",
]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN2)}


def family_of(model_type: str) -> Family:
    """Raises HpcMpError for a family that has no table."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    raise HpcMpError(f"model_type = {model_type!r}", f"is not one of {', '.join(FAMILIES)}",
                     f"{did_you_mean(model_type, FAMILIES)} Use a model of one of these families".lstrip())


def check_pretrained(spec: JobSpec) -> None:
    """A checkpoint that first values are read from is that of the model. Raises HpcMpError."""
    if spec.model.pretrained is not None:
        config = read_config(spec)
        family = family_of(config["model_type"])
        check_weights(Path(spec.model.pretrained), config, family, family.read(config))


def read_shape(spec: JobSpec) -> ModelShape:
    """The shape of a job's model.

    Raises:
        HpcMpError: for a missing checkpoint, an unknown family or impossible sizes.
    """
    config = read_config(spec)
    return family_of(config["model_type"]).read(config)
