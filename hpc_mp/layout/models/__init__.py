"""Model families as torch-free tables, and the checks that need only a model's shape."""

from importlib import import_module
from pkgutil import iter_modules

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.layout.models import families
from hpc_mp.layout.models.experts import ExpertCut, expert_capacity, expert_slots
from hpc_mp.layout.models.family import Family, Weight
from hpc_mp.layout.models.shape import ModelShape, chunk_sizes
from hpc_mp.layout.models.tensor import TensorCut, kv_copies, left_whole

__all__ = [
    "FAMILIES", "ExpertCut", "Family", "ModelShape", "TensorCut", "Weight", "chunk_sizes", "expert_capacity", "expert_slots",
    "family_of", "kv_copies", "left_whole", "table_of",
]

MODULES = [import_module(f"{families.__name__}.{file.name}") for file in iter_modules(families.__path__)]
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in MODULES}

# Families that resemble a supported family only by name.
OTHERS = frozenset({"mistral", "ministral", "qwen2_moe", "qwen2_vl", "gpt_neo", "gpt_oss", "mllama", "codellama"})


def family_of(shape: ModelShape) -> Family:
    """Return the family of a model: as it was read, or its table."""
    return shape.table or FAMILIES[shape.model_type]


def table_of(model_type: str) -> Family:
    """Return the table of a family. Raises HpcMpError for a family without a table."""
    if model_type in FAMILIES:
        return FAMILIES[model_type]
    slip = "" if model_type in OTHERS or model_type[:-1] in ("llama", "qwen") else did_you_mean(model_type, FAMILIES)
    raise HpcMpError(f"model_type = {model_type!r}", f"is not one of {', '.join(FAMILIES)}",
                     f"{slip} Use a model of one of these families, or start its own training program with `hpc-mp run`".lstrip())
