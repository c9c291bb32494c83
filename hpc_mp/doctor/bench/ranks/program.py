"""The program of a rank: meet the other ranks, measure every size, let rank 0 print the results.

A size is warmed up, timed, and its data compared, as nccl-tests does.
"""

import os
import platform
import socket
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.ranks import pattern
from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec, Voice, load_spec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED, Collective, Counts, Placed

if TYPE_CHECKING:
    from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork

@dataclass(frozen=True, slots=True)
class Buffers:
    """The send and receive buffers; for in-place operations ``receive`` holds both."""

    send: Any
    receive: Any

    def views(self, collective: Collective, counts: Counts, placed: Placed, member: int) -> tuple[Any, Any]:
        """Return (send, receive) for one operation; in place they overlap as the library requires."""
        send, receive = self.send[: counts.send], self.receive[: counts.receive]
        if placed == "out_of_place":
            return send, receive
        part = slice(member * counts.param, (member + 1) * counts.param)
        buffer = self.receive[: counts.total]
        return buffer[part] if collective.send_part else buffer, buffer[part] if collective.receive_part else buffer


def allocate(network: "TorchNetwork", counts: Counts) -> Buffers:
    """Allocate the buffers for one size."""
    return Buffers(network.buffer(counts.total), network.buffer(counts.total))


class Sample(NamedTuple):
    """The measurement of one rank: mean seconds by the host's clock, number of wrong elements, seconds of each iteration."""

    mean: float
    wrong: int
    iterations: list[float]


def measure(network: "TorchNetwork", collective: Collective, counts: Counts, buffers: Buffers, placed: Placed, warmup: int,
            iterations: int, check: bool) -> Sample:
    """Measure one placement. All ranks must call this at the same time."""
    send, receive = buffers.views(collective, counts, placed, network.member)
    run = network.operation(collective, send, receive)
    _fill(network, collective, send, receive, 0)
    for _ in range(warmup):
        run()
    network.finish()
    network.barrier()
    began = time.perf_counter()
    stamps = [network.stamp()]
    for _ in range(iterations):
        run()
        stamps.append(network.stamp())
    network.finish()
    mean = (time.perf_counter() - began) / iterations
    network.barrier()
    wrong = 0
    if check and placed in collective.checked:
        _fill(network, collective, send, receive, 1)
        network.barrier()
        run()
        network.finish()
        wrong = _wrong(network, collective, counts, receive, 1)
    return Sample(mean, wrong, network.between(stamps))


def _fill(network: "TorchNetwork", collective: Collective, send: Any, receive: Any, repetition: int) -> None:
    receive[...] = 0
    table = pattern.sent(collective, network.member, network.members, repetition)
    if not collective.rooted or network.member == 0:
        pattern.write(send, network.table(table))
    network.finish()


def _wrong(network: "TorchNetwork", collective: Collective, counts: Counts, receive: Any, repetition: int) -> int:
    expected = pattern.received(collective, network.member, network.members, repetition, counts.param)
    share = len(receive) // len(expected)
    return sum(pattern.wrong(receive[i * share:(i + 1) * share], network.table(table)) for i, table in enumerate(expected))


def forked(path: Path) -> int:
    """Run a rank of the emulator, which passes the specification in a file."""
    return run(load_spec(path.read_text(encoding="utf-8")))


def run(spec: BenchSpec) -> int:
    """Run the measurement and return the exit code: 2 if this rank finds the input wrong."""
    voice = Voice()
    try:
        network = _connect(spec, voice)
    except HpcMpError as error:
        voice.say("refused", value=error.value, rule=error.rule, remedy=error.remedy)
        return 2
    introduce(network, spec, voice)
    for size in spec.sizes:
        measure_size(network, spec, size, voice)
    if network.rank == 0:
        voice.say("end")
    network.barrier()
    network.close()
    return 0


def _connect(spec: BenchSpec, voice: Voice) -> "TorchNetwork":
    from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork, meet

    return TorchNetwork(spec, *meet(spec, voice, os.environ, sys.stdin))


def introduce(network: "TorchNetwork", spec: BenchSpec, voice: Voice) -> None:
    """Print the event ``ranks`` on rank 0."""
    records = network.gather({
        "rank": network.rank, "group": spec.group_of(network.rank), "pid": os.getpid(),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "device": network.rank % spec.ranks_per_node, "name": network.device if network.device != "cpu" else platform.machine(),
    })
    if records is not None:
        voice.say("ranks", ranks=records, versions=network.versions)


def measure_size(network: "TorchNetwork", spec: BenchSpec, size: int, voice: Voice) -> None:
    """Measure both placements; rank 0 prints the measurements of all ranks."""
    collective: Collective = COLLECTIVES[spec.collective]
    if network.rank == 0:
        voice.say("size", size=size)
    counts = collective.counts(size, network.members, ELEMENT[spec.dtype])
    buffers = allocate(network, counts)
    samples = {placed: measure(network, collective, counts, buffers, placed, spec.warmup, spec.iterations, spec.check)
               for placed in PLACED}
    results = network.gather(samples)
    if results is not None:
        voice.say("row", size=size, ranks=results)


if __name__ == "__main__":
    sys.exit(run(load_spec(sys.argv[1])))
