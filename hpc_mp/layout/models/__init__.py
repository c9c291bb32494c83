"""Model families as torch-free tables, and the checks that need only a model's shape."""

from importlib import import_module
from pkgutil import iter_modules

from hpc_mp.layout.models import families
from hpc_mp.layout.models.experts import ExpertCut, expert_capacity, expert_slots
from hpc_mp.layout.models.family import Family, Weight, classifying
from hpc_mp.layout.models.shape import ModelShape, chunk_sizes
from hpc_mp.layout.models.sheet import ReadShape
from hpc_mp.layout.models.tensor import TensorCut, kv_copies, left_whole

__all__ = [
    "FAMILIES", "ExpertCut", "Family", "ModelShape", "TensorCut", "Weight", "chunk_sizes", "expert_capacity", "expert_slots",
    "family_of", "kv_copies", "left_whole",
]

MODULES = [import_module(f"{families.__name__}.{file.name}") for file in iter_modules(families.__path__)]
FAMILIES: dict[str, Family] = {module.FAMILY.model_type: module.FAMILY for module in MODULES}


def family_of(shape: ModelShape) -> Family:
    """Return the family of a model: as it was read, or its table."""
    family = shape.family if isinstance(shape, ReadShape) else FAMILIES[shape.model_type]
    return classifying(family) if shape.classes else family
