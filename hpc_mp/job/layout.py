"""The layout of a job, and the shape of its model: the only way from a job file to both."""

from dataclasses import replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.job.learning_rate import check_factors
from hpc_mp.job.lora import Lora
from hpc_mp.job.spec import JobSpec
from hpc_mp.layout.checks import check_layout
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.model_profile import ModelProfile, conditions, read_profile
from hpc_mp.layout.models import Family, ModelShape, family_of
from hpc_mp.layout.models.adapter_weights import trained_weights
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.peft_files import stored_adapters
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.layout.models.shape import Config, config_of, text_part
from hpc_mp.layout.models.weight_files import check_weights
from hpc_mp.layout.optimizers import SLOTS
from hpc_mp.layout.placement import Degrees
from hpc_mp.layout.stages import Partition, StageCut, cut_stages

CLASSES = "single_label_classification"  # transformers' name of this loss


def read_config(spec: JobSpec) -> Config:
    """Return the configuration of the job's language model, which may be a part of another, with the classes that the job names.
    Raises HpcMpError if the checkpoint or its config.json is missing or unreadable."""
    names = dict(enumerate(spec.data.labels))
    return text_part(whole_config(spec)) | ({
        "id2label": {str(number): name for number, name in names.items()}, "problem_type": CLASSES,
        "label2id": {name: number for number, name in names.items()}} if names else {})


def whole_config(spec: JobSpec) -> Config:
    """Return the model's configuration, from the job file or from the checkpoint's config.json. Raises HpcMpError as above."""
    if spec.model.config is not None:
        return dict(spec.model.config)
    assert spec.model.pretrained is not None  # a job has exactly one of the two
    return config_of(Path(spec.model.pretrained))


def read_shape(spec: JobSpec) -> ModelShape:
    """Return the shape of a job's model, with its adapters. Raises HpcMpError for a missing checkpoint, an unknown family,
    impossible sizes, an unknown field of its configuration, or adapters of another model."""
    shape = model_shape(read_config(spec), spec.model.pretrained).of_classes(len(spec.data.labels))
    return replace(shape, adapters=adapters_of(spec.lora, family_of(shape), shape), prompt=spec.data.prompt_length or 0)


def adapters_of(lora: Lora, family: Family, shape: ModelShape) -> Adapters | None:
    """Return the adapters of a model; None if its own weights are trained. Raises HpcMpError if those in ``pretrained`` are not
    adapters of this model."""
    if lora.pretrained is not None:
        return stored_adapters(Path(lora.pretrained), family, shape, lora.dropout)
    if lora.rank == 0:
        return None
    return Adapters(lora.rank, lora.rank if lora.alpha is None else lora.alpha, lora.modules, lora.dropout, lora.rslora)


def check_pretrained(spec: JobSpec) -> list[str]:
    """Check that the checkpoint for first values belongs to the model. Return the weights that begin with initial values, because
    it lacks them. Raises HpcMpError."""
    if spec.model.pretrained is None:
        return []
    shape, directory, names = read_shape(spec), Path(spec.model.pretrained), spec.data.labels
    without = check_weights(directory, read_config(spec), family_of(shape), shape)
    held = tuple((config_of(directory).get("id2label") or {}).values())
    if names and not without and {*held} == {*names} and held != names:
        raise HpcMpError(f"data.labels = {shown(names)}", f"is not the order of the head in model.pretrained = {directory}",
                         f"write labels = {shown(held)}")
    return sorted(without)


def degrees_of(spec: JobSpec) -> Degrees:
    p = spec.parallel
    return Degrees(tensor=p.tensor, pipeline=p.pipeline, data=spec.data_degree, context=p.context, expert=p.expert)


def undivided(spec: JobSpec) -> Layout:
    """Return the layout of a job without the layers of its stages."""
    p, train = spec.parallel, spec.train
    return Layout(
        degrees=degrees_of(spec), order=p.order, rank_map=p.rank_map, ranks_per_node=spec.job.ranks_per_node,
        samples=spec.microbatch_size, sequence=spec.data.sequence_length, microbatches=spec.microbatches,
        schedule=p.schedule, virtual_stages=p.virtual_stages, zero=p.zero, shard_degree=spec.shard_degree, reduce=spec.reduce,
        sequence_parallel=p.sequence, tensor_modules=p.tensor_modules, context_method=p.context_method, recompute=p.recompute,
        offload=tuple(p.offload) if p.offload != "none" else (), offload_directory=p.offload_directory,
        offload_horizon=spec.offload_horizon, precision=train.precision,
        optimizer=train.optimizer, optimizer_slots=SLOTS[train.optimizer] + (train.optimizer == "sgd" and train.momentum > 0),
        narrow_slots=("exp_avg",) if train.exp_avg_dtype else (), expert_capacity=train.expert_capacity)


def layout_of(spec: JobSpec, shape: ModelShape) -> Layout:
    """Return the layout of a job that ``check_job`` has accepted. Raises HpcMpError as ``stage_cut`` does."""
    return replace(undivided(spec), layers=stage_cut(spec, shape).layers)


def stage_cut(spec: JobSpec, shape: ModelShape) -> StageCut:
    """Return the layers of every stage, with the reason. Raises HpcMpError for a pattern that names too few or too many stages,
    or as ``partition_of`` does."""
    return cut_stages(undivided(spec), shape, partition_of(spec, shape))


def check_job(spec: JobSpec, shape: ModelShape) -> None:
    """Raise HpcMpError as ``check_division``, or if the model learns something else than a job file prepares."""
    if shape.bidirectional and not shape.classes:
        raise HpcMpError(f"model_type = {shape.model_type!r}", f"{shape.model_type} models are trained on masked tokens, but "
                         "a job file prepares text for the next token",
                         'train it in a loop of your own, with hpc_mp.parallel, or set train.objective = "classification"')
    if shape.encoder or spec.data.prompt_length is not None:
        _check_encoder(spec, shape)
    check_division(spec, shape)
    check_factors(spec.train.lr_factors, (weight.name for weight in trained_weights(family_of(shape), shape)))


def _check_encoder(spec: JobSpec, shape: ModelShape) -> None:
    """Raise HpcMpError if a model with an encoder gets other data than prompts, or a setting that it does not support."""
    data, p, kind, length = spec.data, spec.parallel, shape.model_type, spec.data.sequence_length
    value = f"data.prompt_length = {shown(data.prompt_length)}"
    if not shape.encoder:
        raise HpcMpError(value, f"has no effect: {kind} has no encoder", "leave it out")
    if data.prompt_length is None or data.prompt_length >= length:
        raise HpcMpError(value, f"must be less than data.sequence_length({length}): the encoder of {kind} has so many places, "
                         "the decoder the rest", "set it to the tokens of the longest prompt")
    objective = spec.train.objective
    rules: tuple[tuple[str, object, bool, str], ...] = (
        ("train.objective", objective, objective == "next_token", "it has a head of words alone"),
        ("data.format", data.format, data.format == "prompt", "the encoder sees a prompt, and the decoder its completion"),
        ("data.documents", data.documents, data.documents == "joined", "each row is a sample of its own already"),
        ("parallel.recompute", p.recompute, p.recompute != "selective", "biases are added to its scores"),
        ("parallel.partition", p.partition, p.partition != "profile", "what is measured has no prompts"),
        ("parallel.tensor_modules", p.tensor_modules, p.tensor_modules == ("*",), "all layers share a table, cut by heads"),
        ("train.compile", spec.train.compile, not spec.train.compile, "its loop over both stacks is not compiled"),
        ("lora.rank", shape.adapters and shape.adapters.rank, not shape.adapters, "adapters are for models of one stack"))
    for key, setting, taken, reason in rules:
        if not taken:
            raise HpcMpError(f"{key} = {shown(setting)}", f"is not supported for {kind}: {reason}",
                             'set data.format = "prompt"' if key == "data.format" else "leave it out")


def check_division(spec: JobSpec, shape: ModelShape) -> None:
    """Raise HpcMpError, with the arithmetic, if the model cannot be divided, or has no use for a setting of its experts. The
    measured profile is not read."""
    check_layout(undivided(spec), shape, Partition(spec.parallel.partition))
    family = family_of(shape)
    dropout = family.dropout if spec.train.dropout is None else spec.train.dropout
    if family.drops_by and dropout:
        raise HpcMpError(f"a dropout of {dropout:g}", f"is not supported for {shape.model_type}: its own code drops elements by "
                         f"{family.drops_by}, other ones on every layout", "set train.dropout = 0")
    if family.unattended and spec.data.documents == "separate":
        raise HpcMpError('data.documents = "separate"', f"is not supported for {shape.model_type}: its layer "
                         f"{min(family.unattended)} mixes tokens by something else than attention, which would mix documents",
                         'use documents = "joined"')
    for key in ("router_balance", "router_z", "expert_capacity"):
        value = getattr(spec.train, key)
        if value and not shape.experts:
            raise HpcMpError(f"train.{key} = {value:g}", f"has no effect: {shape.model_type} has no experts, and so no router",
                             "leave it out")
    for key in ("router_balance", "router_z"):
        if (value := getattr(spec.train, key)) and not family.router:
            raise HpcMpError(f"train.{key} = {value:g}", f"is not supported: the router of {shape.model_type} returns no "
                             "logits", "leave it out")


def partition_of(spec: JobSpec, shape: ModelShape) -> Partition:
    """Return how a job distributes layers over stages. Raises HpcMpError if its measured profile is missing, or is a profile of
    something else."""
    method = spec.parallel.partition
    return Partition(method, *((profile_of(spec, shape), spec.memory_weight) if method == "profile" else ()))


def measured_with(spec: JobSpec, shape: ModelShape) -> dict[str, object]:
    """Return the settings of a job that measured seconds and bytes depend on."""
    return conditions(undivided(spec), shape, spec.data.documents, spec.train.dropout)


def profile_of(spec: JobSpec, shape: ModelShape) -> ModelProfile:
    """Return the job's measured profile. Raises HpcMpError as ``read_profile`` does."""
    return read_profile(spec.profile, measured_with(spec, shape))
