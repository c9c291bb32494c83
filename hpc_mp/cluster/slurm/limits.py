"""A site's limits for this user: accounts, qualities of service, and access to a partition; and a partition's limits for one
job: number of nodes, time, and the resources of each node."""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.query import SlurmPartition
from hpc_mp.cluster.slurm.records import find_record
from hpc_mp.job.values import seconds_of


@dataclass(frozen=True, slots=True)
class Association:
    """The user and an account. ``partition`` is None if it holds for all; ``max_wall`` is in Slurm's format."""

    account: str
    partition: str | None
    qos: tuple[str, ...]
    default_qos: str | None
    max_wall: str | None


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service. ``per_user``: limit of all of the user's jobs together, ``{"gres/gpu": 4}``."""

    name: str
    max_wall: str | None = None
    per_user: Mapping[str, int] = field(default_factory=dict)
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionAccess:
    """Accounts and qualities that a partition accepts; None: all."""

    accounts: frozenset[str] | None = None
    no_accounts: frozenset[str] = frozenset()
    qos: frozenset[str] | None = None
    no_qos: frozenset[str] = frozenset()

    def takes_account(self, name: str) -> bool:
        return (self.accounts is None or name.lower() in self.accounts) and name.lower() not in self.no_accounts

    def takes_qos(self, name: str) -> bool:
        return (self.qos is None or name.lower() in self.qos) and name.lower() not in self.no_qos


@dataclass(frozen=True, slots=True)
class JobTerms:
    """Terms of a first job."""

    account: str | None = None  # the account to charge; None if the site has none
    qos: str | None = None  # the quality to request; None if the default suffices
    quality: Qos | None = None  # limits of the quality in effect, requested or not; None if unknown
    max_wall: str | None = None  # the shortest time limit of a job, in Slurm's format; None without one


def accounts(user: str, ask: Runner = ask) -> tuple[str, ...]:
    """Return the accounts that ``user`` may charge, the default one first; none if the site has no accounts."""
    rows = _sacctmgr(ask, "user", "DefaultAccount,Account", user, "withassoc")
    return tuple(dict.fromkeys(name for column in zip(*rows, strict=True) for name in column if name))


def associations(user: str, ask: Runner = ask) -> tuple[Association, ...]:
    """Return the associations of ``user``; none if the site has no accounts."""
    rows = _sacctmgr(ask, "assoc", "Account,Partition,QOS,DefaultQOS,MaxWall", f"user={user}")
    return tuple(Association(account, partition or None, tuple(filter(None, qos.split(","))), default or None, wall or None)
                 for account, partition, qos, default, wall in rows)


def qualities(ask: Runner = ask) -> dict[str, Qos]:
    """Return qualities of service by name; none if the site has no accounts."""
    rows = _sacctmgr(ask, "qos", "Name,MaxWall,MaxTRESPerUser,MaxJobsPerUser")
    return {name: Qos(name, wall or None, {key: int(count) for key, count in re.findall(r"([^=,]+)=(\d+)", tres)},
                          int(jobs) if jobs else None)
            for name, wall, tres, jobs in rows}


def partition_access(partition: str, ask: Runner = ask) -> PartitionAccess:
    """Return the access to a partition; open to all if Slurm does not report it."""
    facts = find_record("partition", partition, ask)
    return PartitionAccess(_names(facts.get("AllowAccounts")), _names(facts.get("DenyAccounts")) or frozenset(),
                _names(facts.get("AllowQos")), _names(facts.get("DenyQos")) or frozenset())


def terms(partition: str, time_limit: str | None, accounts: Sequence[str], mine: Sequence[Association],
          qos_by_name: Mapping[str, Qos], access: PartitionAccess) -> JobTerms:
    """Return the first account and quality of service that the partition accepts, the user's defaults first. ``time_limit``: time
    limit of the partition. ``accounts``: in order of preference."""
    account = next(filter(access.takes_account, accounts), accounts[0] if accounts else None)
    held = sorted((association for association in mine
                   if association.account == account and association.partition in (None, partition)),
                  key=lambda association: association.partition is None)
    if not held:
        return JobTerms(account, max_wall=time_limit)
    default = held[0].default_qos or next(iter(held[0].qos), None)
    serves = default is None or access.takes_qos(default)
    qos = default if serves else next(filter(access.takes_qos, held[0].qos), None)
    quality = qos_by_name.get(qos) if qos else None
    walls = filter(None, (time_limit, held[0].max_wall, quality.max_wall if quality else None))
    return JobTerms(account, None if serves else qos, quality, min(walls, key=seconds, default=None))


def seconds(limit: str) -> int:
    """Return the seconds of a site's time limit, in Slurm's notation."""
    return seconds_of(limit) or 0


def _sacctmgr(ask: Runner, what: str, columns: str, *where: str) -> list[list[str]]:
    try:
        answer = ask(("sacctmgr", "--noheader", "--parsable2", "show", what, *where, f"format={columns}"))
    except CommandFailed:
        return []
    return [row for line in answer.splitlines() if len(row := line.split("|")) == columns.count(",") + 1]


def _names(text: str | None) -> frozenset[str] | None:
    return None if text in (None, "", "ALL") else frozenset(text.lower().split(","))


@dataclass(frozen=True, slots=True)
class PartitionLimits:
    """The limits of a partition on one job."""

    partition: SlurmPartition  # the partition with its visible nodes; the ``cpus`` of its kinds are those that a job may use
    total: int  # number of its nodes, including those that sinfo hides: powered-down nodes of a cloud
    # min_nodes, max_nodes: limits on the nodes of a job; None without such a limit
    min_nodes: int | None = None
    max_nodes: int | None = None
    cpus: int | None = None  # the minimum over its nodes of CPUs that a job may use; None if Slurm shows no records of them
    threads_per_core: int = 1  # of these nodes


def partition_limits(partition: SlurmPartition, ask: Runner = ask) -> PartitionLimits:
    """Query the partition's record, and the record of one node of each kind. An unanswered query sets no limit."""
    record = find_record("partition", partition.name, ask)
    nodes = [find_record("node", kind.nodes[0], ask) for kind in partition.kinds]
    most_cpus = _numbers([record.get("MaxCPUsPerNode")])
    usable = [min([*_numbers([node.get("CPUEfctv") or node.get("CPUTot")]), *most_cpus], default=None) for node in nodes]
    kinds = tuple(kind if cpus is None else replace(kind, cpus=cpus) for kind, cpus in zip(partition.kinds, usable, strict=True))
    visible = sum(len(kind.nodes) for kind in kinds)
    return PartitionLimits(
        replace(partition, kinds=kinds),
        total=max([visible, *_numbers([record.get("TotalNodes")])]),
        min_nodes=_number(record.get("MinNodes")),
        max_nodes=_number(record.get("MaxNodes")),
        cpus=min((cpus for cpus in usable if cpus is not None), default=None),
        threads_per_core=max(_numbers(node.get("ThreadsPerCore") for node in nodes), default=1),
    )


def _number(text: str | None) -> int | None:
    """Parse a number; None also for UNLIMITED."""
    return next(iter(_numbers([text])), None)


def _numbers(texts: Iterable[str | None]) -> list[int]:
    return [int(text) for text in texts if text and text.isdigit()]
