"""The first values of a job's model: drawn or read, and those of its adapters."""

from pathlib import Path

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_config
from hpc_mp.layout.models import ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import head_beside
from hpc_mp.layout.models.peft_files import stored_names
from hpc_mp.layout.models.weight_files import lacking, weight_files
from hpc_mp.rundir.staged import staged, staging_root
from hpc_mp.train.model import initial
from hpc_mp.train.model.transformers_model import TransformersModel
from hpc_mp.train.model.transformers_modules import hugging_face_config
from hpc_mp.train.parallel.fill import Source


def first_values(spec: JobSpec, shape: ModelShape) -> Source:
    """Return the source of first values of the model's own weights and of its adapters."""
    family = family_of(shape)
    pretrained = spec.lora.pretrained
    own_head = {weight.name for weight in head_beside(family, shape) if pretrained is None}
    factors = stored_names(family, shape).keys() - own_head
    own = own_values(spec, shape)
    of_adapters = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, {}) if pretrained is None else (
        initial.read_adapters(Path(pretrained), family, shape))
    return lambda weight, box: (of_adapters if weight.name in factors else own)(weight, box)


def own_values(spec: JobSpec, shape: ModelShape) -> Source:
    """Return the source of first values of the model's own weights; those that its checkpoint may lack are drawn."""
    family = family_of(shape)
    if spec.model.pretrained is None:
        modules = TransformersModel(hugging_face_config(read_config(spec), family, spec.train.dropout), family, shape)
        return initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, modules.padding)
    directory = staged(Path(spec.model.pretrained), staging_root())
    stored, without = initial.read(directory, family), lacking(weight_files(directory), family, shape)
    new = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, {})
    return lambda weight, box: (new if weight.name in without else stored)(weight, box)
