"""What a site lets me do: accounts, qualities of service and their limits, and whom a partition takes."""

from __future__ import annotations

import functools
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.cluster.slurm.records import find_record


@dataclass(frozen=True, slots=True)
class Association:
    """I and an account. ``partition`` is None where it holds for all; ``max_wall`` as Slurm writes it."""

    account: str
    partition: str | None
    qos: tuple[str, ...]
    default_qos: str | None
    max_wall: str | None


@dataclass(frozen=True, slots=True)
class Qos:
    """A quality of service. ``per_user``: what all my jobs together may use, ``{"gres/gpu": 4}``."""

    name: str
    max_wall: str | None = None
    per_user: Mapping[str, int] = field(default_factory=dict)
    jobs: int | None = None


@dataclass(frozen=True, slots=True)
class PartitionAccess:
    """Whom a partition takes; None: all."""

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
    """On what terms a first job runs.

    Attributes:
        account: to charge; None where the site keeps none.
        qos: to ask for; None where the default serves.
        quality: the limits of the one that holds, whether asked for or not; None when unknown.
        max_wall: the shortest of the limits on a job's time, as Slurm writes it; None without one.
    """

    account: str | None = None
    qos: str | None = None
    quality: Qos | None = None
    max_wall: str | None = None


def associations(user: str, ask: Runner = ask) -> tuple[Association, ...]:
    """Of ``user``; none where the site keeps no accounts."""
    rows = _sacctmgr(ask, "assoc", "Account,Partition,QOS,DefaultQOS,MaxWall", f"user={user}")
    return tuple(Association(account, partition or None, tuple(filter(None, qos.split(","))), default or None, wall or None)
                 for account, partition, qos, default, wall in rows)


def qualities(ask: Runner = ask) -> dict[str, Qos]:
    """By name; none where the site keeps no accounts."""
    rows = _sacctmgr(ask, "qos", "Name,MaxWall,MaxTRESPerUser,MaxJobsPerUser")
    return {name: Qos(name, wall or None, {key: int(count) for key, count in re.findall(r"([^=,]+)=(\d+)", tres)},
                          int(jobs) if jobs else None)
            for name, wall, tres, jobs in rows}


def partition_access(partition: str, ask: Runner = ask) -> PartitionAccess:
    """Whom the partition takes; everybody when Slurm does not tell."""
    facts = find_record("partition", partition, ask)
    return PartitionAccess(_names(facts.get("AllowAccounts")), _names(facts.get("DenyAccounts")) or frozenset(),
                _names(facts.get("AllowQos")), _names(facts.get("DenyQos")) or frozenset())


def terms(
    partition: str, time_limit: str | None, accounts: Sequence[str], mine: Sequence[Association],
    known: Mapping[str, Qos], access: PartitionAccess,
) -> JobTerms:
    """The first account and quality of service that the partition takes, my defaults before others.

    Args:
        time_limit: of the partition.
        accounts: in the order of preference.
    """
    account = next(filter(access.takes_account, accounts), accounts[0] if accounts else None)
    held = sorted((each for each in mine if each.account == account and each.partition in (None, partition)),
                  key=lambda each: each.partition is None)
    if not held:
        return JobTerms(account, max_wall=time_limit)
    default = held[0].default_qos or next(iter(held[0].qos), None)
    serves = default is None or access.takes_qos(default)
    qos = default if serves else next(filter(access.takes_qos, held[0].qos), None)
    quality = known.get(qos) if qos else None
    walls = filter(None, (time_limit, held[0].max_wall, quality.max_wall if quality else None))
    return JobTerms(account, None if serves else qos, quality, min(walls, key=seconds, default=None))


def seconds(limit: str) -> int:
    """Of ``days-hours:minutes:seconds``, from the right as much of it as is there."""
    days, _, clock = limit.rpartition("-")
    return int(days or 0) * 86400 + functools.reduce(lambda total, part: total * 60 + int(part), clock.split(":"), 0)


def _sacctmgr(ask: Runner, what: str, columns: str, *where: str) -> list[list[str]]:
    try:
        answer = ask(("sacctmgr", "--noheader", "--parsable2", "show", what, *where, f"format={columns}"))
    except CommandFailed:
        return []
    return [row for line in answer.splitlines() if len(row := line.split("|")) == columns.count(",") + 1]


def _names(text: str | None) -> frozenset[str] | None:
    return None if text in (None, "", "ALL") else frozenset(text.lower().split(","))
