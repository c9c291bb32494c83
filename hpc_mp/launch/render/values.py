"""Template values that are not in the job file: derived from the job and the facts of the cluster, and quoted for the script."""

import re
import shlex
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.options import options_of
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.rundir import RunDirectory


class Verbatim(str):
    """Text that is inserted into a script unchanged."""

    __slots__ = ()


def shell(value: object) -> str:
    """Return one word for bash; ``Verbatim`` text is unchanged."""
    return str(value) if isinstance(value, Verbatim) else shlex.quote(str(value))


def directive(value: object) -> Verbatim:
    """Return one word for a ``#SBATCH`` line, which bash never reads. sbatch has its own rules (``get_argument`` in
    src/sbatch/opt.c): a backslash escapes even between single quotes, and ``#`` outside of quotes ends the line, also inside a
    word."""
    text = str(value)
    if shlex.quote(text) == text:
        return Verbatim(text)
    escaped = text.replace("\\", "\\\\").replace("'", "\\'")
    return Verbatim(f"'{escaped}'")


def literal(path: object) -> str:
    """Return a path with Slurm's file name patterns (``%j``) escaped."""
    return str(path).replace("%", "%%")


GPU_REQUESTS = {"auto": "gpus-per-node={}", "gpus-per-node": "gpus-per-node={}", "gres": "gres=gpu:{}"}
EARLY_S = 60  # Slurm may send --signal this much early (man sbatch)
START_S = 60  # in which ranks start: an earlier warning is of no use
ENVIRONMENT_PYTHON = Verbatim('"$HPC_MP_LOCAL/env/bin/python"')  # slurm/node-start.sh unpacks the environment there


@dataclass(frozen=True, slots=True)
class JobComponent:
    """Nodes of one kind: the whole job, or a component of a heterogeneous one. ``gpus``: the option that requests GPUs, without
    its dashes; None if the part requests none, or by ``extra``. ``extra``: its options from ``slurm.extra``, without
    ``cpus-per-task``; in the first part also those of the whole job."""

    nodes: int
    partition: str | None
    constraint: str | None
    gpus: str | None
    cpus: int | None
    extra: dict[str, str | int | bool]

    @property
    def exclusive(self) -> bool:
        return not {"exclusive", "oversubscribe"} & self.extra.keys()

    @property
    def all_memory(self) -> bool:
        return not {"mem", "mem-per-cpu", "mem-per-gpu"} & self.extra.keys()


def parts(spec: AnySpec, facts: ClusterFacts) -> list[JobComponent]:
    """Return the job's parts, in order: one, unless ``slurm.components`` lists several."""
    slurm, gpus, cpus = spec.slurm, gpu_request(spec), cpus_per_task(spec, facts)
    common = {name: value for name, value in slurm.extra.items() if name != "cpus-per-task"}
    if not slurm.components:
        return [JobComponent(spec.job.nodes, slurm.partition, slurm.constraint, gpus, cpus, common)]
    repeated = {name: value for name, value in options_of(spec, "component").items() if name != "cpus-per-task"}
    components = []
    for number, component in enumerate(slurm.components):
        options = {name: value for name, value in component.extra.items() if name != "cpus-per-task"}
        asks_itself = {"gres", "gpus-per-node"} & component.extra.keys()
        components.append(JobComponent(
            component.nodes, component.partition or slurm.partition, component.constraint or slurm.constraint,
            None if asks_itself else gpus, _whole(component.extra.get("cpus-per-task")) or cpus,
            {**(repeated if number else common), **options}))
    return components


def gpu_request(spec: AnySpec) -> str | None:
    """Return the option of sbatch, without its dashes, that requests one GPU per rank; None if the job requests none."""
    if spec.job.device == "cpu" or spec.slurm.gpu_request == "none" or (isinstance(spec, ProgramSpec) and spec.by_script):
        return None
    kind = f"{spec.slurm.gpu_type}:" if spec.slurm.gpu_type else ""
    return GPU_REQUESTS[spec.slurm.gpu_request].format(f"{kind}{spec.job.ranks_per_node}")


def cpus_per_task(spec: AnySpec, facts: ClusterFacts) -> int | None:
    """Return the CPUs of a rank, as Slurm counts them: as given, else its share of a node; None for the site's default. The share
    is in whole cores, of the CPUs that jobs get rather than all those of a node. On a shared node a rank takes the CPUs that
    belong to one GPU. ``cpus-per-task = false`` leaves them to the site."""
    requested = [_whole(extra.get("cpus-per-task")) for extra in (spec.slurm.extra, *(c.extra for c in spec.slurm.components))]
    if any(requested):
        return min(filter(None, requested))
    elsewhere = any(component.partition not in (None, spec.slurm.partition) for component in spec.slurm.components)
    by_script = isinstance(spec, ProgramSpec) and spec.by_script
    if facts.cpus is None or elsewhere or by_script or {"cpus-per-gpu", "cpus-per-task"} & spec.slurm.extra.keys():
        return None
    shares = spec.job.ranks_per_node
    if spec.slurm.extra.get("exclusive") is False or "oversubscribe" in spec.slurm.extra:
        gpus = max((kind.gpu_count for kind in facts.partition.kinds), default=0) if facts.partition else 0
        if not gpus:
            return None
        shares = max(shares, gpus)
    cores = facts.cpus // facts.threads_per_core // shares
    return max(1, cores if one_thread_per_core(spec) else cores * facts.threads_per_core)


def threads(spec: AnySpec, facts: ClusterFacts) -> int | None:
    """Return the threads of a rank: one per core that it has; None if its CPUs are unknown."""
    cpus = cpus_per_task(spec, facts)
    if cpus is None or one_thread_per_core(spec):
        return cpus
    return max(1, cpus // facts.threads_per_core)


def slurm_log(run: Path, *, array: bool) -> str:
    """Return Slurm's pattern of the file for the script's own output; all runs of a sweep write into the first one's directory.
    It is outside of ``log/``, whose files move away with each attempt, because Slurm keeps this one open."""
    name = RunDirectory.slurm_log.name.format(job="%A_%a" if array else "%j")
    return f"{literal(run)}/{name}"


def rank_python(spec: AnySpec, python: str) -> str:
    """Return the interpreter of the ranks; ``Verbatim`` if only the script's shell knows it."""
    slurm = spec.slurm
    if spec.environment.stage:
        return ENVIRONMENT_PYTHON
    if slurm.python:
        return slurm.python
    if slurm.container:
        return "python3"
    if slurm.venv:
        return f"{slurm.venv}/bin/python"
    if slurm.conda:
        return f"{slurm.conda}/bin/python" if "/" in slurm.conda else Verbatim('"$CONDA_PREFIX/bin/python"')
    return python


def _whole(value: str | int | bool | None) -> int | None:
    """Return ``cpus-per-task`` as a number; None if it is left to the site. Raises HpcMpError."""
    if value is None or value is False:
        return None
    if isinstance(value, bool) or not re.fullmatch(r"[1-9]\d{0,6}", str(value)):
        raise HpcMpError(f"slurm.extra.cpus-per-task = {value!r}", "must be a whole number of at least 1", "write for example 12")
    return int(value)


def one_thread_per_core(spec: AnySpec) -> bool:
    """Return True if the job requests one CPU of each core, however many threads the cores have."""
    extra = spec.slurm.extra
    return extra.get("hint") == "nomultithread" or str(extra.get("threads-per-core")) == "1"


MOUNT = re.compile(r"(?P<source>/[^,:]*)(:(?P<target>/[^,:]*)(:(?P<flags>[a-z]+([+][a-z]+)*))?)?")
_WILD = re.compile(r"[*?\[]")


def runtime(spec: AnySpec, facts: ClusterFacts) -> str | None:
    """Return ``pyxis``, ``apptainer`` or ``singularity``; None for a job without a container. ``auto``: pyxis if srun has it."""
    if spec.slurm.container is None:
        return None
    if spec.slurm.container_runtime == "auto":
        return "pyxis" if facts.has_pyxis else "apptainer"
    return spec.slurm.container_runtime


def mounts(spec: AnySpec) -> list[str]:
    """Return ``SOURCE:TARGET[:FLAGS]`` of each directory that ranks read or write, and of those that the job names. Raises
    HpcMpError if the container's options would read a path as two, or a path would hide the image."""
    if spec.slurm.container is None:
        return []
    requested = [_mount(text) for text in spec.slurm.container_mounts]
    return [*(f"{path}:{path}" for path in map(_plain, _needed(spec))), *requested]


def _needed(spec: AnySpec) -> list[str]:
    """Return the directories that the run needs, none inside another: for runs, data, model and tokenizer."""
    if isinstance(spec, ProgramSpec):
        paths: list[str | None] = [spec.job.directory, spec.program.directory, *spec.program.stage]
    else:
        paths = [spec.job.directory, spec.model.pretrained, spec.data.tokenizer, spec.checkpoint.resume,
                 *(next(str(parent) for parent in Path(pattern).parents if not _WILD.search(str(parent)))
                   for pattern in (*spec.data.files, *spec.evaluate.files, spec.data.template) if pattern)]
    directories = sorted({PurePosixPath(path) for path in paths if path})
    return [str(path) for path in directories if not any(other in path.parents for other in directories)]


def _plain(path: str) -> str:
    if path == "/":
        raise HpcMpError("the root directory as a place of data", "would hide the image inside the container",
                         "move the files into a directory")
    if re.search("[,:]", path):
        raise HpcMpError(f"the path {path}", "holds a comma or a colon, which part the mounts of a container",
                         "move it, or give slurm.container_mounts another name of it")
    return path


def _mount(text: str) -> str:
    match = MOUNT.fullmatch(text)
    if not match:
        raise HpcMpError(f"slurm.container_mounts: {text!r}", "does not read SOURCE[:TARGET[:FLAGS]] with absolute paths",
                         'write for example "/data:/inside:ro"')
    flags = f":{match['flags']}" if match["flags"] else ""
    return f"{match['source']}:{match['target'] or match['source']}{flags}"
