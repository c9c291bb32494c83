"""The plan of a program's job file, and its default sizes. Tasks of a program without axes lie along the data axis, in order."""

import os
import shutil
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted
from hpc_mp.cluster.bad_nodes import bad_nodes, ledger
from hpc_mp.cluster.bandwidth import noted
from hpc_mp.cluster.node.nvidia_smi import find_gpus
from hpc_mp.cluster.slurm.allocation import AllocatedTasks, Where, allocated_tasks, decide
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import ProgramSpec
from hpc_mp.job.program import meets_through_mpi
from hpc_mp.job.resolution import ProgramChoices, ResolvedKey, resolved
from hpc_mp.job.values import toml_value
from hpc_mp.launch.choices import avoided
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.plan import JobPlan, Target, fitting, machine_choices
from hpc_mp.launch.program.files import check_files
from hpc_mp.launch.program.launchers import check_command
from hpc_mp.layout.placement import Degrees, Placement, numbered, place
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.plan import RunPlan, Traffic

MPI = "slurm.mpi"
PLUGINS = ("pmix", "pmi2")  # values in order of preference: Open MPI 5 knows only PMIx, MPICH both
MPIRUN = "mpirun"  # used if srun has none of them


@dataclass(frozen=True, slots=True, kw_only=True)
class ProgramPlan(JobPlan):
    """The plan of a user's program."""

    user_spec: ProgramSpec
    spec: ProgramSpec
    resolution: ProgramChoices


def compose_program(user_spec: ProgramSpec, where: Where, target: Target, slurm_version: Version | None = None,
                    resumed: RunDirectory | None = None) -> ProgramPlan:
    """Make all choices and all checks. Raises HpcMpError if the command starts ranks itself, a directory or program is missing, a
    back end is only for MPI, a GPU is missing, an environment profile does not exist, or the job could never start."""
    check_command(user_spec)
    if where.place == "mpi" and user_spec.program.start != "mpi":
        raise HpcMpError("--on mpi", "is for programs whose ranks meet through MPI",
                         'set program.start = "mpi", or use --on slurm or --on local')
    if user_spec.by_script and where.place != "slurm":
        raise HpcMpError('program.start = "script"', "is for jobs of its own: sbatch would give its script other variables",
                         "launch it with --on slurm on a machine of the cluster")
    if not Path(user_spec.program.directory).is_dir():
        raise HpcMpError(f"program.directory = {toml_value(user_spec.program.directory)}", "is no directory here",
                         "name one that all nodes see")
    check_files(user_spec, target.in_script)
    facts = target.facts(user_spec, slurm_version)
    bad = bad_nodes(ledger(facts.cluster), run=resumed.path if resumed else None) if facts.cluster is not None else {}
    measured = noted(facts.cluster)
    gpus = target.gpus(user_spec, facts)
    machine = machine_choices(user_spec, target, facts, bad, gpus, measured)
    choices = ProgramChoices(machine.device, machine.gpu_request, machine.gpu_type, machine.exclude, machine.profile,
                             _plugin(user_spec, facts, target))
    exclude = fitting(user_spec, choices, target, facts, bad)
    choices = replace(choices, exclude=exclude)
    placement = _placement(user_spec)
    record = RunPlan((), Traffic(), (), choices=tuple(key for key in choices.keys if key.why), place=where.place)
    return ProgramPlan(
        user_spec=user_spec, resolution=choices, spec=resolved(user_spec, choices.keys), where=where, placement=placement,
        device=gpus.device, record=record, facts=facts, measured=measured, avoided=avoided(user_spec, exclude, bad),
        resumes=resumed)


def _placement(spec: ProgramSpec) -> Placement:
    """Place ranks along the data axis, or as the program's axes number them. Raises HpcMpError if the rank map does not fit."""
    p, per_node = spec.parallel, spec.tasks_per_node
    if spec.program.axes is None:
        return place(Degrees(data=spec.job.nodes * per_node), "cluster", per_node, "block")
    degrees = Degrees(p.tensor, p.pipeline, spec.data_degree, p.context)
    return numbered(degrees, spec.program.axes, p.order, per_node, p.rank_map)


def _plugin(spec: ProgramSpec, facts: ClusterFacts, target: Target) -> ResolvedKey[str]:
    """Return the value of ``slurm.mpi``: the job's own, else the first allowed one that the site's srun has, else mpirun. Raises
    HpcMpError if srun lacks the requested plug-in, or nothing could provide the requested mpirun."""
    requested, available = spec.slurm.mpi, facts.mpi_plugins
    if not meets_through_mpi(spec) or not target.in_script:
        return ResolvedKey(MPI, requested)
    shown = ", ".join(available or ())
    if requested == MPIRUN:
        _check_mpirun(spec, f"slurm.mpi = {toml_value(requested)}")
        return ResolvedKey(MPI, requested)
    if requested != "none":
        if available is not None and requested not in available:
            raise HpcMpError(f"slurm.mpi = {toml_value(requested)}", f"is none of what this site's srun has: {shown}",
                             'leave slurm.mpi out, choose one of these, or set slurm.mpi = "mpirun" with program.start = "mpi"')
        return ResolvedKey(MPI, requested)
    if available is None:
        return ResolvedKey(MPI, PLUGINS[0], "what most sites have; `srun --mpi=list` did not tell")
    plugin = next((name for name in PLUGINS if name in available), None)
    if plugin is None:
        why = f"this site's srun has none of {', '.join(PLUGINS)} (it has {shown})"
        _check_mpirun(spec, f'program.start = "mpi": {why}, and mpirun')
        return ResolvedKey(MPI, MPIRUN, f"mpirun, for {why}")
    return ResolvedKey(MPI, plugin, f"the first of {', '.join(PLUGINS)} that this site's srun has")


def _check_mpirun(spec: ProgramSpec, value: str) -> None:
    """Raise HpcMpError if mpirun is not here and nothing in the job could provide it, or if it must not start ranks."""
    slurm = spec.slurm
    if slurm.container is not None:
        raise HpcMpError(value, "starts ranks outside of the image, whose MPI would not meet that mpirun",
                         "let program.command start the container")
    provided = slurm.modules or slurm.setup or slurm.conda or slurm.venv or "PATH" in spec.environment.set
    if not provided and shutil.which("mpirun") is None:
        raise HpcMpError(value, "is not on PATH here, which the job keeps, and nothing in it could bring it",
                         "name the site's MPI module in slurm.modules, or let slurm.setup put its directory on PATH")


@dataclass(frozen=True, slots=True)
class ProgramSize:
    """The size of a program. ``why``: source of the numbers that were not given; empty if both were."""

    nodes: int
    ranks_per_node: int
    why: str


def size_of(spec: ProgramSpec, nodes: int | None, ranks_per_node: int | None, on: str, environ: Mapping[str, str] = os.environ,
            place: Callable[[str], Where] = decide, facts: Callable[[ProgramSpec], ClusterFacts] = ask_cluster,
            gpus: Callable[[], int] = lambda: len(find_gpus())) -> ProgramSize:
    """Return the size of a program.

    Args:
        spec: the job, as far as known: its partition, its device.
        nodes, ranks_per_node: values from the command line; None if not given.
        on: the requested back end.
        place, facts, gpus: functions that return the back end, the cluster's facts, and the number of GPUs of this machine.
    """
    if nodes is not None and ranks_per_node is not None:
        return ProgramSize(nodes, ranks_per_node, "")
    where = place(on).place
    if where == "step":
        allocation = allocated_tasks(environ)
        ranks, why = _allocated_ranks(allocation, spec)
        return ProgramSize(nodes or allocation.nodes, ranks_per_node or ranks,
                           f"{counted(allocation.nodes, 'node')} of the allocation, {why}")
    if ranks_per_node is not None:
        return ProgramSize(nodes or 1, ranks_per_node, "1 node")
    count = 0
    if spec.job.device != "cpu":
        partition = facts(spec).partition if where == "slurm" else None
        count = gpus() if where != "slurm" else max((kind.gpu_count for kind in partition.kinds), default=0) if partition else 0
    owner = "the partition's nodes" if where == "slurm" else "this machine"
    why = f"a rank per GPU of {owner}" if count else "one rank per node, as no GPU is known"
    return ProgramSize(nodes or 1, max(1, count), why)


def _allocated_ranks(allocation: AllocatedTasks, spec: ProgramSpec) -> tuple[int, str]:
    if allocation.tasks_per_node:
        return allocation.tasks_per_node, "as many ranks as it has tasks on a node"
    if allocation.gpus_per_node and spec.job.device != "cpu":
        return allocation.gpus_per_node, "a rank per GPU"
    return 1, "one rank per node, as it says neither tasks nor GPUs"
