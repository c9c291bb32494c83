"""Checks of main memory, swap, huge pages, NUMA and shared memory."""

from collections.abc import Iterator

from hpc_mp.base.text import counted, memory_size, several
from hpc_mp.cluster.node.memory import SHM, HostMemory, SharedMemory, read_memory, read_shared
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well

_SIZE_TOLERANCE = 0.95  # of the machine kind's memory; the firmware reserves some
_NODE_TOLERANCE = 0.9  # of the largest memory node
_SHM, _SHM_TINY = 1 << 30, 64 << 20  # the second is the default of containers
_FULL = 0.9


def installed(memory: HostMemory) -> Iterator[Judgement]:
    if memory.kind is not None and memory.kind.memory_seen_gib is not None:
        size, expected = memory.of["MemTotal"] / 2**30, memory.kind.memory_seen_gib
        yield Judgement("ok" if size >= _SIZE_TOLERANCE * expected else "error",
                        f"{memory_size(size * 2**30)}; a {memory.kind.name} has {memory_size(expected * 2**30)}")


def nodes(memory: HostMemory) -> Iterator[Judgement]:
    if len(memory.nodes) > 1:
        largest = max(memory.nodes.values())
        small = (Judgement("warning", f"{memory_size(size)}; the largest has {memory_size(largest)}", f"memory node {node}")
                 for node, size in memory.nodes.items() if size < _NODE_TOLERANCE * largest)
        yield from or_well(small, f"{len(memory.nodes)} memory nodes of {memory_size(largest)}")


def free(memory: HostMemory) -> Iterator[Judgement]:
    total, available = memory.of["MemTotal"], memory.of["MemAvailable"]
    yield Judgement("ok" if available >= 0.05 * total else "warning",
                    f"{memory_size(available)} of {memory_size(total)} can be had")


def swap(memory: HostMemory) -> Iterator[Judgement]:
    total = memory.of["SwapTotal"]
    used = total - memory.of["SwapFree"]
    bad = used > 0.1 * total and used > 1 << 30
    yield Judgement("warning" if bad else "ok", f"{memory_size(used)} of {memory_size(total)} are used" if total else "none")


def huge(memory: HostMemory) -> Iterator[Judgement]:
    total, idle = memory.of.get("HugePages_Total", 0), memory.of.get("HugePages_Free", 0)
    reserved = idle * memory.of.get("Hugepagesize", 0)
    bad = reserved > 0.1 * memory.of["MemTotal"]
    yield Judgement("warning" if bad else "ok",
                    f"{total} are set aside, {idle} of them unused ({memory_size(reserved)})" if total else "none are set aside")


def reclaim(memory: HostMemory) -> Iterator[Judgement]:
    if (mode := memory.settings.get("zone_reclaim_mode")) is not None:
        yield Judgement("warning" if mode else "ok", f"vm.zone_reclaim_mode = {mode}")


def balancing(memory: HostMemory) -> Iterator[Judgement]:
    on = memory.settings.get("numa_balancing")
    if on is not None:
        bad = on != 0 and memory.gpus and len(memory.nodes) > 1
        yield Judgement("warning" if bad else "ok", f"kernel.numa_balancing = {on}, {len(memory.nodes)} memory nodes")


def shared(shm: SharedMemory) -> Iterator[Judgement]:
    size, used = shm.room.size, shm.room.size - shm.room.free
    if size < _SHM:
        yield Judgement("error" if size <= _SHM_TINY else "warning",
                        f"{memory_size(size)}; NCCL and data workers share memory through it", SHM)
    elif used > _FULL * size:
        yield Judgement("warning", f"{memory_size(used)} of {memory_size(size)} are used", SHM,
                        "find out who left it (ls -l /dev/shm) and remove it")
    else:
        yield Judgement("ok", f"{memory_size(used)} of {memory_size(size)} are used", SHM)


def left(shm: SharedMemory) -> Iterator[Judgement]:
    used = shm.room.size - shm.room.free
    names = [name.rpartition("/")[2] for name in shm.left]
    bad = len(names) > 0 and used > 0.05 * shm.memory
    yield Judgement("warning" if bad else "ok",
                    f"{counted(len(names), 'file')} as NCCL, torch and MPI make them, {memory_size(used)} in all"
                    + (f": {several(names)}" if names else ""), SHM)


CHECKS = (
    *checks_of(read_memory, {
        "memory-size": installed,
        "memory-nodes": nodes,
        "memory-free": free,
        "memory-swap": swap,
        "memory-hugepages": huge,
        "memory-reclaim": reclaim,
        "numa-balancing": balancing,
    }),
    *checks_of(read_shared, {"shm-size": shared, "shm-leftovers": left}),
)
