"""The resources here: this machine's cores, memory and GPUs, and its Slurm cluster, if any."""

import getpass
import os
from collections.abc import Mapping
from dataclasses import dataclass

import psutil

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.node.nvidia_smi import Gpu, find_gpus
from hpc_mp.cluster.slurm.limits import JobTerms, accounts, associations, partition_access, qualities, terms
from hpc_mp.cluster.slurm.nodes import usable_cpus
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition, partitions, version, why_silent


@dataclass(frozen=True, slots=True)
class ThisMachine:
    """This machine: ``cores`` that this process may use, ``memory`` in bytes."""

    cores: int
    memory: int
    gpus: tuple[Gpu, ...]


@dataclass(frozen=True, slots=True)
class SlurmSite:
    """A Slurm cluster that answers, and the partition of a first job."""

    version: tuple[int, int] | None
    partitions: tuple[SlurmPartition, ...]  # all partitions
    chosen: SlurmPartition  # the partition for a first job
    kind: NodeKind  # its nodes with the most GPUs
    cpus: int  # CPUs of a node of that kind that jobs may use
    accounts: tuple[str, ...]  # accounts that this user may charge, the default first
    terms: JobTerms  # terms of a first job in ``chosen``


def find_machine() -> ThisMachine:
    return ThisMachine(len(os.sched_getaffinity(0)), psutil.virtual_memory().total, find_gpus())


def find_site(environ: Mapping[str, str] = os.environ, ask: Runner = ask) -> SlurmSite | str:
    """Return the cluster, or the reason why none can be used.

    ``SBATCH_PARTITION`` and ``SBATCH_ACCOUNT`` are respected, because users set them in their profile. Else the partition is the
    default one if it has GPUs, or the first with GPUs, or the default one.
    """
    silent = why_silent(ask)
    if silent is not None:
        return silent
    try:
        all_partitions = partitions(ask)
    except CommandFailed as error:
        return str(error)
    usable = [partition for partition in all_partitions if partition.up and partition.kinds]
    if not usable:
        return "Slurm answers, but shows no partition that is up"
    preferred = environ.get("SBATCH_PARTITION")
    chosen = max(usable, key=lambda partition: (
        partition.name == preferred, any(kind.gpu_count for kind in partition.kinds), partition.default))
    kind = max(chosen.kinds, key=lambda kind: (kind.gpu_count, len(kind.nodes)))
    own_account, user = environ.get("SBATCH_ACCOUNT"), getpass.getuser()
    charged = tuple(dict.fromkeys([*([own_account] if own_account else []), *accounts(user, ask)]))
    return SlurmSite(version(ask), all_partitions, chosen, kind, usable_cpus(kind.nodes[0], ask) or kind.cpus, charged,
                terms(chosen.name, chosen.time_limit, charged, associations(user, ask), qualities(ask),
                      partition_access(chosen.name, ask)))
