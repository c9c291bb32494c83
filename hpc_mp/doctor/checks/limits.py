"""Checks of process limits and of the control group's limits."""

from collections.abc import Iterator

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import memory_size
from hpc_mp.cluster.node.limits import Cgroup, Limit, Limits, read_cgroup, read_limits
from hpc_mp.doctor.checks.check import Judgement, checks_of

_FILES, _FEW_FILES = 131_072, 16_384
_PROCESSES = 16_384
_STACK = 8 << 20
_FULL = 0.95
_ALL = 0.95  # of the memory; the firmware reserves some of the installed memory
_THROTTLED = 0.05


def locked(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["locked memory"]
    if limit.soft is None or (limits.memory and limit.soft >= _ALL * limits.memory):
        yield Judgement("ok", "unlimited" if limit.soft is None else "as much as there is memory, or more")
    else:
        why = "adapters for RDMA are here, which lock what they send" if limits.rdma else "no adapter for RDMA is here"
        yield Judgement("error" if limits.rdma else "ok", f"{memory_size(limit.soft)}; {why}")


def files(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["open files"]
    highest = float("inf") if limit.hard is None else limit.hard
    grave: Severity = "ok" if highest >= _FILES else "warning"
    if highest < _FEW_FILES:
        grave = "error" if limits.rdma else "warning"
    yield Judgement(grave, f"{_both(limit)}; {_FILES} serve any job")


def stack(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["stack size"]
    if limit.soft is None:
        yield Judgement("warning", "unlimited: threads then get 2 MiB, too little for NCCL before 2.28")
    else:
        yield Judgement("ok" if limit.soft >= _STACK else "warning", memory_size(limit.soft))


def processes(limits: Limits) -> Iterator[Judgement]:
    limit = limits.of["processes"]
    enough = limit.soft is None or limit.soft >= _PROCESSES
    yield Judgement("ok" if enough else "warning", f"{_both(limit)} processes and threads of this user")


def _both(limit: Limit) -> str:
    return " of ".join("unlimited" if value is None else str(value) for value in (limit.soft, limit.hard))


def memory(cgroup: Cgroup) -> Iterator[Judgement]:
    limit, used, requested = cgroup.grant.memory, cgroup.grant.used or 0, cgroup.requested.get("memory")
    if limit is None:
        yield Judgement("ok", "no limit")
    elif requested is not None and limit < requested:
        yield Judgement("error", f"the control group grants {memory_size(limit)}, the job asked for {memory_size(requested)}")
    elif used > _FULL * limit:
        yield Judgement("warning", f"{memory_size(used)} of {memory_size(limit)} are used; page cache and /dev/shm count",
                        fix="ask for more memory, or find what fills it: processes are killed when it is full")
    else:
        yield Judgement("ok", f"{memory_size(used)} of {memory_size(limit)} are used")


def killed(cgroup: Cgroup) -> Iterator[Judgement]:
    if cgroup.grant.killed is not None:
        bad = cgroup.grant.killed > 0
        yield Judgement("warning" if bad else "ok", f"{cgroup.grant.killed} processes were killed for memory")


def cpus(cgroup: Cgroup) -> Iterator[Judgement]:
    requested, grant = cgroup.requested.get("cpus"), cgroup.grant
    have = min(count for count in (grant.cpus, cgroup.allowed, grant.share) if count is not None)
    if requested is not None and have < requested:
        yield Judgement("error", f"{have:g} processors may be used, the job asked for {requested}")
    elif grant.throttled is not None and grant.throttled > _THROTTLED:
        yield Judgement("warning",
                        f"the time of {grant.share or have:g} processors was used up in {grant.throttled:.0%} of the periods",
                        fix="ask for more processors, or start fewer threads")
    else:
        yield Judgement("ok", f"{have:g} of {cgroup.online} processors may be used")


def tasks(cgroup: Cgroup) -> Iterator[Judgement]:
    limit = cgroup.grant.tasks
    if limit is not None:
        yield Judgement("ok" if limit >= _PROCESSES else "warning", f"{limit} processes and threads may exist")


CHECKS = (
    *checks_of(read_limits, {"limit-memlock": locked, "limit-nofile": files, "limit-stack": stack, "limit-processes": processes}),
    *checks_of(read_cgroup, {"cgroup-memory": memory, "cgroup-oom": killed, "cgroup-cpus": cpus, "cgroup-pids": tasks}),
)
