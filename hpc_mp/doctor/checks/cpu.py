"""Checks of processors, their governor and clock source; and of stuck, zombie and leftover processes."""

from collections.abc import Iterator

from hpc_mp.base.text import duration, several
from hpc_mp.cluster.node.cpu import Cpus, read_cpus
from hpc_mp.cluster.node.processes import NodeProcess, Processes, read_processes
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well

_GOOD_CLOCKS = ("tsc", "kvm-clock", "hyperv_clocksource_tsc_page", "arch_sys_counter", "timebase", "tod", "xen")
_GOOD_GOVERNORS = ("performance", "schedutil")


def count(cpus: Cpus) -> Iterator[Judgement]:
    if cpus.offline:
        yield Judgement("warning", f"{len(cpus.offline)} processors are switched off, {cpus.online} are on",
                        fix="echo 1 > /sys/devices/system/cpu/cpuN/online; nosmt at boot switches half of them off on purpose")
    if cpus.kind is None:
        if not cpus.offline:
            yield Judgement("ok", f"{cpus.online} processors in {cpus.sockets or 'unknown'} sockets")
        return
    kind = cpus.kind
    evidence = (f"{cpus.online} processors in {cpus.sockets or 'unknown'} sockets, {cpus.nodes} memory nodes; "
                f"a {kind.name} has {kind.vcpus} in {kind.sockets}, {kind.numa} memory nodes")
    good = cpus.online == kind.vcpus and cpus.sockets in (None, kind.sockets) and cpus.nodes == kind.numa
    if not (cpus.offline and cpus.online + len(cpus.offline) == kind.vcpus):
        yield Judgement("ok" if good else "error", evidence)


def governor(cpus: Cpus) -> Iterator[Judgement]:
    bad = (Judgement("warning", f"{name} on {many} of {cpus.online} processors")
           for name, many in cpus.governors.items() if name not in _GOOD_GOVERNORS)
    yield from or_well(bad, ", ".join(f"{name} on {many}" for name, many in cpus.governors.items()))


def clock(cpus: Cpus) -> Iterator[Judgement]:
    if cpus.clock is not None:
        good = cpus.clock in _GOOD_CLOCKS
        yield Judgement("ok" if good else "warning", f"{cpus.clock}; there are {', '.join(cpus.clocks)}")


CHECKS = checks_of(read_cpus, {"cpu-count": count, "cpu-governor": governor, "clocksource": clock})


_ZOMBIES = 20


def stuck(processes: Processes) -> Iterator[Judgement]:
    names = [f"{_named(process)} in {process.waits}" if process.waits else _named(process) for process in processes.stuck]
    yield Judgement("warning" if names else "ok",
                    f"{len(names)} processes wait in the kernel and do not come on: {several(names)}" if names
                    else f"none of {processes.count} processes")


def zombies(processes: Processes) -> Iterator[Judgement]:
    count = len(processes.zombies)
    yield Judgement("warning" if count > _ZOMBIES else "ok",
                    f"{count} dead processes that nobody waits for: {several([*map(_named, processes.zombies)])}".rstrip(": "))


def orphans(processes: Processes) -> Iterator[Judgement]:
    if processes.slurm:
        names = [f"{_named(process)} of user {process.user}, {duration(process.age)} old" for process in processes.orphans]
        yield Judgement("warning" if names else "ok",
                        f"{len(names)} processes of users whose parent has gone: {several(names)}" if names else "none")


def _named(process: NodeProcess) -> str:
    return f"{process.name} ({process.pid})"


PROCESSES = checks_of(read_processes, {"process-stuck": stuck, "process-zombies": zombies, "process-leftovers": orphans})
