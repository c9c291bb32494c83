"""Facts about a Slurm cluster that the launcher needs to write a job script, queried in one place."""

from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.limits import PartitionLimits, partition_limits
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.query import SlurmPartition, last_line, partition_names, partitions, until_silent, version
from hpc_mp.cluster.slurm.records import find_settings
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.cluster.slurm.steps import mpi_plugins, srun_options
from hpc_mp.job import AnySpec, ProgramSpec
from hpc_mp.job.program import meets_through_mpi


@dataclass(frozen=True, slots=True)
class ClusterFacts:
    """Facts about a cluster and the partition of one job; None if Slurm did not report them."""

    version: Version | None = None  # release of Slurm
    cluster: str | None = None  # its name
    partition: SlurmPartition | None = None  # the job's partition; also None if it names several
    # limits of the partitions that the job and its components name, else of the default one
    limits: tuple[PartitionLimits, ...] = ()
    rerouted: bool = False  # True if a site plug-in may redirect a job that names no partition
    gpu_partitions: tuple[str, ...] = ()  # names of the partitions whose nodes list GPUs
    unknown_partition: str | None = None  # a name in the job that no partition has, including hidden ones
    partition_names: tuple[str, ...] = ()  # valid names, if there is such an unknown name
    out_of_service: frozenset[str] = frozenset()  # nodes of the partition that Slurm gives to no job now
    cpus: int | None = None  # CPUs that a job may use on each node of the partition (the minimum of CPUEfctv and MaxCPUsPerNode)
    threads_per_core: int = 1  # threads per core of these nodes
    select: str | None = None  # Slurm's SelectType, such as select/cons_tres
    topology: str | None = None  # its TopologyPlugin, such as topology/tree
    most_elements: int | None = None  # maximum size of a job array (MaxArraySize)
    srun_options: frozenset[str] | None = None  # long options of srun, including those of the site's plug-ins
    mpi_plugins: tuple[str, ...] | None = None  # srun's MPI plug-ins; queried only for tasks that meet through MPI
    allocation: tuple[str, ...] | None = None  # the nodes of the allocation that the job runs in; None outside of one
    silence: str | None = None  # reason why partitions are unknown, in Slurm's last words

    @property
    def has_pyxis(self) -> bool:
        return self.srun_options is not None and "container-image" in self.srun_options


def ask_cluster(spec: AnySpec, release: Version | None = None, ask: Runner = ask) -> ClusterFacts:
    """Query Slurm. Unanswered questions are not errors. A silent controller is asked only once. ``release``: the version to write
    for, in place of the detected one."""
    ask = until_silent(ask)
    silence = partition = unknown = None
    listed: tuple[SlurmPartition, ...] = ()
    try:
        listed = partitions(ask)
        name = spec.slurm.partition
        partition = next((entry for entry in listed if entry.name == name or (name is None and entry.default)), None)
        unknown = _unknown(spec, [entry.name for entry in listed], ask)
    except CommandFailed as error:
        silence = last_line(error)
    named = {name for names in _lists(spec) for name in names.split(",")}
    limits = tuple(partition_limits(entry, ask) for entry in listed if entry == partition or entry.name in named)
    job_limits = next((limit for limit in limits if partition is not None and limit.partition.name == partition.name), None)
    config = find_settings(ask)
    return ClusterFacts(
        version=release or version(ask),
        cluster=config.get("ClusterName") or None,
        partition=partition,
        limits=limits,
        rerouted=bool(config.get("JobSubmitPlugins")),
        gpu_partitions=tuple(entry.name for entry in listed if any(kind.gpus for kind in entry.kinds)),
        unknown_partition=unknown,
        partition_names=tuple(entry.name for entry in listed) if unknown is not None else (),
        out_of_service=_out_of_service(partition, ask) if partition is not None else frozenset(),
        cpus=job_limits.cpus if job_limits else None,
        threads_per_core=job_limits.threads_per_core if job_limits else 1,
        select=config.get("SelectType") or None,
        topology=config.get("TopologyPlugin") or None,
        most_elements=int(maximum) if (maximum := config.get("MaxArraySize", "")).isdigit() else None,
        srun_options=srun_options(ask) if spec.slurm.container else None,
        mpi_plugins=mpi_plugins(ask) if isinstance(spec, ProgramSpec) and meets_through_mpi(spec) else None,
        silence=silence,
    )


def outside(spec: AnySpec, release: Version | None) -> ClusterFacts:
    """Return the facts if Slurm starts no ranks: it is not queried."""
    return ClusterFacts(release)


def _out_of_service(partition: SlurmPartition, ask: Runner) -> frozenset[str]:
    try:
        states = node_states(partition=partition.name, ask=ask)
    except CommandFailed:
        return frozenset()
    return frozenset(node for node, state in states.items() if not state.in_service)


def _unknown(spec: AnySpec, listed: Sequence[str], ask: Runner) -> str | None:
    """Return the first name in the job's lists of partitions that does not exist. Sites may hide partitions that still take jobs.
    Raises CommandFailed if Slurm does not answer."""
    if "clusters" in spec.slurm.extra:  # another cluster knows it
        return None
    unseen = [name for names in _lists(spec) for name in names.split(",") if name not in listed]
    hidden = partition_names(ask) if unseen else ()
    return next((name for name in unseen if name not in hidden), None)


def _lists(spec: AnySpec) -> list[str]:
    """Return the lists of partitions that the job and its components name."""
    return list(filter(None, (spec.slurm.partition, *(component.partition for component in spec.slurm.components))))
