"""Model families as torch-free tables, and the checks that need only a model's shape."""

from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.job import JobSpec
from hpc_mp.layout.models.experts import ExpertCut, check_experts, expert_capacity, expert_cut
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.fields import check_fields
from hpc_mp.layout.models.gpt2 import GPT2
from hpc_mp.layout.models.gptj import GPTJ
from hpc_mp.layout.models.llama import LLAMA
from hpc_mp.layout.models.mixtral import MIXTRAL
from hpc_mp.layout.models.model_profile import ModelProfile, UnitProfile, conditions, read_profile, write_profile
from hpc_mp.layout.models.qwen2 import QWEN2
from hpc_mp.layout.models.shape import ModelShape, chunk_sizes, read_config
from hpc_mp.layout.models.stages import LayerCosts, StageCut, check_stages, cut_stages, layer_costs
from hpc_mp.layout.models.tensor import TensorCut, check_attention, check_tensor, kv_copies, left_whole
from hpc_mp.layout.models.weight_files import check_weights

__all__ = [
    "FAMILIES", "ExpertCut", "Family", "LayerCosts", "ModelProfile", "ModelShape", "StageCut", "TensorCut", "UnitProfile",
    "Weight", "check_layout", "check_pretrained", "chunk_sizes", "conditions", "expert_capacity", "expert_cut", "family_of",
    "kv_copies", "layer_costs", "left_whole", "read_config", "read_profile", "read_shape", "stage_cut", "stage_layers",
    "write_profile",
]

FAMILIES: dict[str, Family] = {family.model_type: family for family in (GPT2, LLAMA, QWEN2, GPTJ, MIXTRAL)}


# Families that resemble a supported family only by name.
OTHERS = frozenset({"mistral", "ministral", "qwen2_moe", "qwen2_vl", "gpt_neo", "gpt_neox", "gpt_oss", "mllama", "codellama"})


def family_of(model_type: str) -> Family:
    """Return the table of a family. Raises HpcMpError for a family without a table."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    slip = "" if model_type in OTHERS or model_type[:-1] in ("llama", "qwen") else did_you_mean(model_type, FAMILIES)
    raise HpcMpError(f"model_type = {model_type!r}", f"is not one of {', '.join(FAMILIES)}",
                     f"{slip} Use a model of one of these families, or start its own training program with `hpc-mp run`".lstrip())


def check_pretrained(spec: JobSpec) -> None:
    """Check that the checkpoint for first values belongs to the model. Raises HpcMpError."""
    if spec.model.pretrained is not None:
        config = read_config(spec)
        family = family_of(config["model_type"])
        check_weights(Path(spec.model.pretrained), config, family, family.read(config))


def read_shape(spec: JobSpec) -> ModelShape:
    """Return the shape of a job's model. Raises HpcMpError for a missing checkpoint, an unknown family, impossible sizes, or an
    unknown field of its configuration."""
    config = read_config(spec)
    family = family_of(config["model_type"])
    check_fields(config, family.fields, family.model_type, spec.model.pretrained)
    return family.read(config)


def check_layout(shape: ModelShape, spec: JobSpec) -> None:
    """Raise HpcMpError, with the arithmetic, if the model cannot be cut as ``spec.parallel`` requires."""
    family = family_of(shape.model_type)
    check_stages(family, shape, spec)
    check_tensor(family, shape, spec)
    check_experts(shape, spec)
    check_attention(family, shape, spec)


def stage_cut(spec: JobSpec, shape: ModelShape) -> StageCut:
    """Return the layers of every global stage, with the reason. Raises HpcMpError."""
    return cut_stages(family_of(shape.model_type), shape, spec)


def stage_layers(spec: JobSpec, shape: ModelShape) -> tuple[int, ...]:
    """Return the layers of every global stage. Raises HpcMpError."""
    return stage_cut(spec, shape).layers
