"""Rules that connect several keys of a job file."""

from collections import Counter

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, shown
from hpc_mp.job.learning_rate import check_schedule
from hpc_mp.job.lora import check_lora
from hpc_mp.job.program import ProgramSpec
from hpc_mp.job.spec import UNCOUNTED, Data, JobSpec, LossScale, ProfiledSteps, Train
from hpc_mp.job.sweep import runs_of
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS
from hpc_mp.layout.schedule.names import check_sizes, stages_per_rank

MUON_MOMENTUM = Train.model_fields["muon_momentum"].default
MOST_RANKS = 2**17  # more than any machine has; counting more would take minutes


def check_arithmetic(spec: JobSpec) -> None:
    p, t = spec.parallel, spec.train
    degree = p.tensor * p.pipeline * p.context
    product = f"tensor({p.tensor}) × pipeline({p.pipeline}) × context({p.context}) = {degree}"
    ranks = _number_of_ranks(spec)
    if spec.ranks % degree:
        raise HpcMpError(product, f"does not divide {counted(spec.ranks, 'rank')} ({ranks})",
                         f"choose degrees whose product divides {spec.ranks}, or a multiple of {degree} as the number of ranks")
    for key, idle in (("sequence", False), ("tensor_modules", ("*",))):
        value = getattr(p, key)
        if p.tensor == 1 and value != idle:
            raise HpcMpError(f"parallel.{key} = {shown(value)}", "has no effect with parallel.tensor = 1",
                             f"set parallel.tensor to 2 or more, or leave {key} out")
    if p.shard_degree is not None and p.zero == 0:
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}", "has no effect with parallel.zero = 0",
                         "set parallel.zero to 1, 2 or 3, or leave shard_degree out")
    if p.reduce == "microbatch" and p.zero < 2:
        raise HpcMpError('parallel.reduce = "microbatch"',
                         f"has no effect with parallel.zero = {p.zero}: ranks then keep whole gradients until the step ends",
                         "set parallel.zero to 2 or 3, or leave reduce out")
    if p.shard_degree is not None and spec.state_degree % p.shard_degree:
        context = "" if p.context == 1 else f" × context({p.context}) = {spec.state_degree}"
        raise HpcMpError(f"parallel.shard_degree = {p.shard_degree}",
                         f"does not divide the data degree {spec.ranks} ranks / ({product}) = {spec.data_degree}{context}",
                         f"use a divisor of {spec.state_degree}, or leave it out")
    if spec.state_degree % p.expert:
        raise HpcMpError(f"parallel.expert = {p.expert}",
                         f"does not divide data({spec.data_degree}) × context({p.context}) = {spec.state_degree}",
                         f"use a divisor of {spec.state_degree}")
    _check_context(spec)
    if p.offload_horizon is not None and "activations" not in p.offload:
        raise HpcMpError(f"parallel.offload_horizon = {p.offload_horizon}", "has no effect unless activations are offloaded",
                         'set parallel.offload = ["activations"], or leave offload_horizon out')
    if spec.slurm.mpi == "mpirun":
        raise HpcMpError('slurm.mpi = "mpirun"', "is only for [program]: srun starts the ranks of hpc-mp's own engine",
                         'set slurm.mpi = "pmix" or "pmi2", or leave it out: its ranks only exchange an address through MPI')
    _check_rank_map(spec)
    check_together(spec)
    for key in ("profile", "memory_weight"):
        if (value := getattr(p, key)) is not None and p.partition != "profile":
            raise HpcMpError(f"parallel.{key} = {shown(value)}", f"has no effect with parallel.partition = {shown(p.partition)}",
                             f'set partition = "profile", or leave {key} out')
    if not isinstance(p.partition, str) and len(p.partition) != spec.stages:
        raise HpcMpError(f"parallel.partition = {shown(p.partition)}",
                         f"has {counted(len(p.partition), 'entry', 'entries')} for {_stages(spec)} stages",
                         'list the number of layers of every stage, or set partition = "auto"')
    if p.microbatches is not None and t.gradient_accumulation_steps is not None:
        raise HpcMpError(f"train.gradient_accumulation_steps = {t.gradient_accumulation_steps}",
                         "is parallel.microbatches under another name, and both are set", "leave one of them out")
    microbatches = p.microbatches or t.gradient_accumulation_steps or 1
    unit = spec.data_degree * microbatches
    if t.global_batch % unit:
        raise HpcMpError(f"train.global_batch = {t.global_batch}",
                         f"is not a multiple of data({spec.data_degree}) × microbatches({microbatches}) = {unit}",
                         f"use {max(1, t.global_batch // unit) * unit} or another multiple of {unit}")
    check_sizes(p.schedule, p.pipeline, spec.microbatches, p.virtual_stages, section="parallel.")
    if t.momentum and t.optimizer != "sgd":
        raise HpcMpError(f"train.momentum = {t.momentum}", f"has no effect with optimizer = {t.optimizer!r}",
                         'use betas with adamw, or optimizer = "sgd"')
    _check_whole_weights(spec)
    _check_offload(spec)
    _check_background(spec)
    _check_precision(spec)
    check_lora(spec.lora)
    _check_classes(spec)
    if spec.evaluate.every and not spec.evaluate.active:
        raise HpcMpError(f"evaluate.every = {spec.evaluate.every}", "has no effect without evaluate.files or evaluate.share",
                         "name the files with held-out text in evaluate.files, or leave evaluate.every out")
    for key, needed in (("patience", "every"), ("gain", "patience")):
        if (value := getattr(spec.evaluate, key)) and not getattr(spec.evaluate, needed):
            raise HpcMpError(f"evaluate.{key} = {value:g}", f"has no effect without evaluate.{needed}",
                             f"set evaluate.{needed}, or leave {key} out")
    if spec.evaluate.best == "accuracy" and not (spec.data.labels and spec.evaluate.active):
        raise HpcMpError('evaluate.best = "accuracy"', 'has no effect without train.objective = "classification", and '
                         "evaluate.files or evaluate.share", "set them, or leave it out: the least loss is best")
    if spec.evaluate.files and spec.evaluate.share:
        raise HpcMpError(f"evaluate.share = {spec.evaluate.share:g}", "holds out text of data.files, but evaluate.files names "
                         "other text", "keep one of them")
    if spec.data.weights and len(spec.data.weights) != len(spec.data.files):
        raise HpcMpError(f"data.weights = {shown(spec.data.weights)}",
                         f"has {counted(len(spec.data.weights), 'entry', 'entries')} for "
                         f"{counted(len(spec.data.files), 'pattern')} in data.files",
                         "write one weight for each pattern")
    if t.steps != UNCOUNTED and t.warmup_steps > t.steps:
        raise HpcMpError(f"train.warmup_steps = {t.warmup_steps}", f"is more than train.steps = {t.steps}: the learning "
                         "rate would never reach its full value", "lower warmup_steps")
    check_schedule(t, counted=t.steps != UNCOUNTED)
    _check_profiler(spec)


def _check_profiler(spec: JobSpec) -> None:
    window, ranks = spec.train.profile, spec.train.profile.on_ranks
    if not window.steps and window != ProfiledSteps():
        raise HpcMpError("train.profile", "has no effect without steps", "set its steps to a number, or leave it out")
    if window.steps and not 0 < len(ranks) == len({*ranks} & {*range(spec.ranks)}):
        raise HpcMpError(f"train.profile.on_ranks = {shown(ranks)}", f"must name ranks from 0 to {spec.ranks - 1}, each once",
                         "use on_ranks = [0]")
    if spec.train.steps != UNCOUNTED and window.steps and window.from_step + window.steps - 1 > spec.train.steps:
        raise HpcMpError(f"train.profile = {{ from_step = {window.from_step}, steps = {window.steps} }}",
                         f"goes beyond train.steps = {spec.train.steps}", "begin earlier, or trace fewer steps")


def check_together(spec: JobSpec | ProgramSpec) -> None:
    """Check the rules common to trainings and programs. Raises HpcMpError."""
    _number_of_ranks(spec)
    if runs_of(spec.sweep) and spec.slurm.chain:
        raise HpcMpError(f"slurm.chain = {spec.slurm.chain}", "cannot follow the runs of a sweep one by one",
                         "leave out one of slurm.chain and [sweep]")
    _check_staged_environment(spec)


def _number_of_ranks(spec: JobSpec | ProgramSpec) -> str:
    """Return the arithmetic of the number of ranks in words. Raises HpcMpError if there are too many."""
    ranks = f"nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node}) = {spec.ranks}"
    if spec.ranks > MOST_RANKS:
        raise HpcMpError(ranks, f"is more than {MOST_RANKS} ranks", "lower job.nodes or job.ranks_per_node")
    return ranks


def _check_context(spec: JobSpec) -> None:
    """Check that every context rank gets the same number of tokens."""
    p, length = spec.parallel, spec.data.sequence_length
    if p.context == 1:
        if p.context_method != "ring":
            raise HpcMpError(f"parallel.context_method = {shown(p.context_method)}", "has no effect with parallel.context = 1",
                             "set parallel.context, or leave context_method out")
        return
    factor, unit = {"ring": ("2 × ", 2 * p.context), "ulysses": ("", p.context)}[p.context_method]
    if length % unit:
        raise HpcMpError(f"data.sequence_length = {length}",
                         f"is not a multiple of {factor}context({p.context}) = {unit}, the number of pieces into which "
                         f'context_method = "{p.context_method}" cuts a sample',
                         f"use {max(1, length // unit) * unit} or another multiple of {unit}")


def _stages(spec: JobSpec) -> str:
    """Return the number of stages, with the arithmetic if ranks hold several."""
    per_rank = stages_per_rank(spec.parallel.schedule, spec.parallel.virtual_stages)
    return f"{spec.stages}" if per_rank == 1 else f"pipeline({spec.parallel.pipeline}) × {per_rank} per rank = {spec.stages}"


def _check_offload(spec: JobSpec) -> None:
    """Check that there is something to offload."""
    p, t = spec.parallel, spec.train
    if p.offload_directory is not None and "optimizer" not in p.offload:
        raise HpcMpError(f"parallel.offload_directory = {shown(p.offload_directory)}", "has no effect without parallel.offload",
                         'add offload = ["optimizer"], or leave it out')
    if "parameters" in p.offload and p.zero < 3:
        raise HpcMpError(f"parallel.offload = {shown(p.offload)}",
                         f"cannot offload parameters with parallel.zero = {p.zero}: every rank keeps all of them on its device",
                         "set parallel.zero = 3, or leave \"parameters\" out")
    if "optimizer" in p.offload and t.optimizer == "sgd" and not t.momentum:
        raise HpcMpError(f"parallel.offload = {shown(p.offload)}", "has no effect: SGD without momentum has no state",
                         "leave it out, or set train.momentum")


def _check_whole_weights(spec: JobSpec) -> None:
    """Check that an optimizer that updates whole weights can have them."""
    t, p = spec.train, spec.parallel
    if t.optimizer != "muon" and t.muon_momentum != MUON_MOMENTUM:
        raise HpcMpError(f"train.muon_momentum = {t.muon_momentum}", f"has no effect with optimizer = {t.optimizer!r}",
                         "leave it out")
    if t.exp_avg_dtype and (t.optimizer != "adamw" or t.precision == "fp64" or p.offload_directory is not None):
        raise HpcMpError(f"train.exp_avg_dtype = {shown(t.exp_avg_dtype)}", "is for AdamW with masters in fp32, and for state "
                         "in memory", 'use optimizer = "adamw", another precision and no offload_directory, or leave it out')
    if t.optimizer not in WHOLE_WEIGHTS:
        return
    for kind in ("optimizer", "parameters"):
        if kind in p.offload:
            raise HpcMpError(f"train.optimizer = {t.optimizer!r}", "updates whole weights on the device, but parallel.offload "
                             f"moves {'its state' if kind == 'optimizer' else 'them'} away in pieces",
                             f'leave "{kind}" out of parallel.offload, or use optimizer = "adamw"')
    if t.optimizer == "adafactor" and p.expert > 1:
        raise HpcMpError('train.optimizer = "adafactor"', f"scales the experts of a block by one norm of all of them, but "
                         f"parallel.expert = {p.expert} leaves no rank all of them",
                         'set parallel.expert = 1, or use optimizer = "adamw" or "muon"')


def _check_background(spec: JobSpec) -> None:
    """Check that there is a checkpoint to write in the background."""
    if spec.checkpoint.background and not spec.checkpoint.every:
        raise HpcMpError("checkpoint.background = true", "has no effect on the last checkpoint, and there is no other one",
                         "set checkpoint.every, or leave it out")
    if spec.parallel.offload_directory is not None and spec.checkpoint.background:
        raise HpcMpError("checkpoint.background = true", "would copy the optimizer state that parallel.offload_directory keeps "
                         "on a disk into memory", "leave one of them out")


def _check_classes(spec: JobSpec) -> None:
    """Check that classes are named where they are learnt, and that nothing is set that has no effect on them."""
    labels, defaults = spec.data.labels, Data.model_fields
    if spec.train.objective != "classification":
        for key in ("labels", "label", "text"):
            if (value := getattr(spec.data, key)) != defaults[key].default:
                raise HpcMpError(f"data.{key} = {shown(value)}", f"has no effect with train.objective = {spec.train.objective!r}",
                                 'set train.objective = "classification", or leave it out')
        return
    if len(labels) < 2 or len({*labels}) < len(labels):
        raise HpcMpError(f"data.labels = {shown(labels)}", 'must name at least two classes, each once, for train.objective = '
                         '"classification"', 'list them in the order of their numbers: labels = ["negative", "positive"]')
    for key in ("data.format", "data.template", "data.weights", "data.documents", "train.router_balance", "train.router_z"):
        section, name = key.split(".")
        value = getattr(getattr(spec, section), name)
        if value != (Data if section == "data" else Train).model_fields[name].default:
            raise HpcMpError(f"{key} = {shown(value)}", "is not for classification: each row is a sample, which is filled up",
                             "leave it out")


def _check_precision(spec: JobSpec) -> None:
    scale = spec.train.loss_scale
    if spec.train.precision == "tf32" and spec.job.device == "cpu":
        raise HpcMpError('train.precision = "tf32"', "needs GPUs: CPUs have no products in this format", 'use precision = "fp32"')
    if spec.train.compile and spec.train.precision == "fp64":
        raise HpcMpError("train.compile = true", 'is not supported with train.precision = "fp64"',
                         "leave it out, or use another precision")
    if spec.train.precision != "fp16" and scale != LossScale():
        raise HpcMpError("train.loss_scale", f"has no effect with train.precision = {spec.train.precision!r}",
                         'leave it out, or use precision = "fp16"')
    if scale.window and scale.minimum > scale.initial:
        raise HpcMpError(f"train.loss_scale.minimum = {scale.minimum:g}", f"is more than initial = {scale.initial:g}",
                         "lower minimum or raise initial")


def _check_staged_environment(spec: JobSpec | ProgramSpec) -> None:
    """Check that an environment to stage exists, and that the login node can determine its place."""
    slurm = spec.slurm
    if not spec.environment.stage:
        return
    if slurm.container is not None:
        raise HpcMpError("environment.stage = true", "has no effect on ranks in a container, which brings its own environment",
                         "leave out one of environment.stage and slurm.container")
    if slurm.conda is not None and "/" not in slurm.conda and slurm.python is None and slurm.venv is None:
        raise HpcMpError(f"slurm.conda = {shown(slurm.conda)}", "is a name, but environment.stage packs a directory",
                         "write the environment's directory (`conda env list` prints it)")


def _check_rank_map(spec: JobSpec) -> None:
    """Check that a list puts exactly ``ranks_per_node`` ranks on each node."""
    nodes = spec.parallel.rank_map
    if isinstance(nodes, str):
        return
    counts = Counter(nodes)
    if counts != dict.fromkeys(range(spec.job.nodes), spec.job.ranks_per_node):
        raise HpcMpError(f"parallel.rank_map = {shown(nodes)}",
                         f"does not put ranks_per_node({spec.job.ranks_per_node}) ranks on each of the nodes 0 to "
                         f"{spec.job.nodes - 1}", "list every node that number of times")
