"""Plan of a benchmark: its groups of ranks, its specification from the user's request, and the start of its ranks."""

import operator
import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from math import prod

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.grouping import grouped
from hpc_mp.cluster.node.nvidia_smi import Gpu, find_gpus
from hpc_mp.cluster.slurm.allocation import Where, job_environment, step_environment
from hpc_mp.cluster.slurm.site import SlurmSite, find_site
from hpc_mp.doctor.bench.spec import Backend, BenchSpec, Event, sweep
from hpc_mp.doctor.bench.start import on_emulated_nodes, on_slurm
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.planner.collectives import ALIGN

SIZES: dict[Backend, tuple[int, int, int]] = {  # defaults: first, last, factor
    "nccl": (2**20, 2**30, 4), "gloo": (2**10, 2**24, 4)}
GPU_OPTIONS = re.compile(r"--(gres|gpus|gpus-per-\w+)=")


@dataclass(frozen=True, slots=True)
class BenchLayout:
    """The ``axis`` of a layout tensor × pipeline × data in ``order``; the data degree follows from the number of ranks."""

    axis: str
    tensor: int
    pipeline: int
    order: str


@dataclass(frozen=True, slots=True)
class BenchRequest:
    """The user's request; None: not given."""

    collective: str
    backend: str = "auto"
    nodes: int | None = None
    ranks_per_node: int | None = None
    split: str = "all"  # argument of ``groups.split``; must be ``all`` with a ``layout``
    layout: BenchLayout | None = None
    sizes: tuple[int | None, int | None, int | None, int | None] = (None, None, None, None)  # first, last, factor, step in bytes
    dtype: str = "float"
    warmup: int = 5
    iterations: int = 20
    check: bool = True
    timeout: float = 300.0
    srun: tuple[str, ...] = ()  # options of srun, such as ``partition=gpu``


@dataclass(frozen=True, slots=True)
class BenchPlan:
    """A benchmark that is ready to start: ``start`` starts the ranks and yields their events."""

    spec: BenchSpec
    start: Callable[[], Iterator[Event]]


def plan(request: BenchRequest, where: Where, environ: Mapping[str, str] = os.environ, ask: Runner = ask,
         gpus: Callable[[], Sequence[Gpu]] = find_gpus,
         site: Callable[[Mapping[str, str]], SlurmSite | str] = find_site) -> BenchPlan:
    """Plan the benchmark. Raises HpcMpError if it cannot be measured. ``gpus``, ``site``: discovery functions."""
    if where.place == "local":
        gpu_count = len(gpus())
        spec = _spec(request, 1, gpu_count or 2, gpu_count)
        return BenchPlan(spec, lambda: on_emulated_nodes(spec, environ))
    if where.place == "step":
        gpus_on_node = environ.get("SLURM_GPUS_ON_NODE", "0")
        gpu_count = int(gpus_on_node) if gpus_on_node.isdigit() else 0
        spec = _spec(request, int(environ.get("SLURM_JOB_NUM_NODES", "1")), gpu_count or 1, gpu_count)
        options = [*_cpus(environ, spec), *_user_options(request)]
        return BenchPlan(spec, lambda: on_slurm(spec, options, step_environment(environ), ask))
    return _job(request, environ, ask, site)


def _job(request: BenchRequest, environ: Mapping[str, str], ask: Runner,
         site: Callable[[Mapping[str, str]], SlurmSite | str]) -> BenchPlan:
    """Plan a separate job on whole nodes: other jobs on them would share their network."""
    user_options = _user_options(request)
    partition = next((option.partition("=")[2] for option in user_options if option.startswith("--partition=")), None)
    slurm_site = site(environ if partition is None else {**environ, "SBATCH_PARTITION": partition})
    if isinstance(slurm_site, str):
        raise HpcMpError("--on slurm", slurm_site, "measure on this machine with --on local, or inside an allocation")
    gpu_count = slurm_site.kind.gpu_count
    spec = _spec(request, min(2, len(slurm_site.kind.nodes)), gpu_count or 1, gpu_count)
    options = [f"--partition={slurm_site.chosen.name}", "--exclusive", "--time=00:30:00", "--job-name=hpc-mp-bench",
               f"--cpus-per-task={max(1, slurm_site.cpus // spec.ranks_per_node)}"]
    if spec.backend == "nccl" and not any(map(GPU_OPTIONS.match, user_options)):
        options.append(f"--gpus-per-node={spec.ranks_per_node}")
    return BenchPlan(spec, lambda: on_slurm(spec, [*options, *user_options], job_environment(environ), ask))


def _user_options(request: BenchRequest) -> list[str]:
    """Return the user's options of srun, which come last and therefore take precedence."""
    wrong = next((option for option in request.srun if not re.match(r"[a-z][a-z-]*(=|$)", option)), None)
    if wrong is not None:
        raise HpcMpError(f"--srun {wrong}", "is no NAME=VALUE", "write an option without its dashes, as in --srun account=abc")
    return ["--mpi=none", *(f"--{option}" for option in request.srun)]


def _cpus(environ: Mapping[str, str], spec: BenchSpec) -> list[str]:
    """Return a rank's share of the allocation's CPUs on each node: SLURM_JOB_CPUS_PER_NODE is ``4(x2),2``."""
    counts = [int(count) for count in re.findall(r"(?:^|,)(\d+)", environ.get("SLURM_JOB_CPUS_PER_NODE", ""))]
    return [f"--cpus-per-task={max(1, min(counts) // spec.ranks_per_node)}"] if counts else []


def _spec(request: BenchRequest, nodes: int, ranks_per_node: int, gpus: int) -> BenchSpec:
    """Return the request with defaults filled in. ``gpus``: GPUs per node."""
    nodes = nodes if request.nodes is None else request.nodes
    local_ranks = ranks_per_node if request.ranks_per_node is None else request.ranks_per_node
    for name, value in (("--nodes", nodes), ("--ranks-per-node", local_ranks)):
        if value < 1:
            raise HpcMpError(f"{name} {value}", "must be at least 1", f"set {name} to 1 or more")
    backend: Backend = "nccl" if gpus >= local_ranks else "gloo"
    if request.backend in ("nccl", "gloo"):
        backend = request.backend  # type: ignore[assignment]
    groups = _groups(request, nodes, local_ranks)
    spec = BenchSpec(request.collective, backend, nodes, local_ranks, groups, _sizes(request, backend, max(map(len, groups))),
                     request.dtype, request.warmup, request.iterations, request.check, request.timeout)
    if not spec.fitting(spec.sizes[0]):
        least = ALIGN * max(map(len, groups))
        raise HpcMpError(f"-b {spec.sizes[0]}", f"is less than {ALIGN} bytes for each of {max(map(len, groups))} ranks",
                         f"begin with at least {least}")
    return spec


def _sizes(request: BenchRequest, backend: Backend, ranks: int) -> tuple[int, ...]:
    """Return the sizes of the sweep. ``ranks``: size of the largest group, in which each rank needs a part to send."""
    first, last, usual = SIZES[backend]
    while first < ALIGN * ranks:
        first *= 2
    begin, end, factor, step = request.sizes
    if begin is None:
        begin = first if end is None else min(first, end)
    if end is None:
        end = max(last, begin)
    return sweep(begin, end, usual if factor is None else factor, step)


def _groups(request: BenchRequest, nodes: int, ranks_per_node: int) -> "Groups":
    layout, world = request.layout, nodes * ranks_per_node
    if layout is None:
        return split(world, ranks_per_node, request.split)
    if request.split != "all":
        raise HpcMpError(f"--split {request.split} --axis {layout.axis}", "are two ways to make groups", "leave one of them out")
    fixed = prod((layout.tensor, layout.pipeline))
    if fixed < 1 or world % fixed:
        raise HpcMpError(f"tp({layout.tensor}) × pp({layout.pipeline}) = {fixed}",
                         f"does not divide {world} ranks = {nodes} nodes × {ranks_per_node}", "change --tp, --pp or the ranks")
    return along(layout.axis, Degrees(layout.tensor, layout.pipeline, world // fixed), layout.order, ranks_per_node)


Groups = tuple[tuple[int, ...], ...]

# As in NCCL_TESTS_SPLIT: ranks with equal results are one group.
OPERATIONS: dict[str, Callable[[int, int], int]] = {
    "AND": operator.and_, "&": operator.and_, "OR": operator.or_, "|": operator.or_,
    "MOD": operator.mod, "%": operator.mod, "DIV": operator.floordiv, "/": operator.floordiv,
}
_SPLIT = re.compile(r"(AND|OR|MOD|DIV|[&|%/])\s*:?\s*(0x[0-9a-f]+|0b[01]+|\d+)", re.IGNORECASE)


def split(world: int, ranks_per_node: int, how: str) -> Groups:
    """Split all ranks into groups, each ascending. Raises HpcMpError for an unknown ``how``.

    ``how`` is ``all``, ``node``, ``rail`` (ranks of the same local rank, one per node), or the syntax of nccl-tests'
    NCCL_TESTS_SPLIT: ``MOD 8``, ``DIV 8``, ``AND 0x7``, ``OR 7``.
    """
    named = {"all": f"DIV {world}", "node": f"DIV {ranks_per_node}", "rail": f"MOD {ranks_per_node}"}
    match = _SPLIT.fullmatch(named.get(how, how).strip())
    if match is None:
        raise HpcMpError(f"--split {how!r}", "must be all, node, rail or as in NCCL_TESTS_SPLIT", 'write for example "MOD 8"')
    operation, value = OPERATIONS[match[1].upper()], int(match[2], 0)
    if value == 0 and operation in (operator.mod, operator.floordiv):
        raise HpcMpError(f"--split {how!r}", "divides by 0", "divide by 1 or more")
    return tuple(map(tuple, grouped((operation(rank, value), rank) for rank in range(world)).values()))


def along(axis: str, degrees: Degrees, order: str, ranks_per_node: int) -> Groups:
    """Return the groups in which a job of this layout communicates along ``axis``. Raises HpcMpError if it has no such axis."""
    groups = place(degrees, order, ranks_per_node).groups
    if axis not in groups:
        raise HpcMpError(f"--axis {axis}", f"is none of this layout's: {', '.join(groups)}", "name one of them")
    return groups[axis]
