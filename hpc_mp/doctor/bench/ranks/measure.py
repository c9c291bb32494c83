"""Measurement of one size and placement: warm up, time, and compare the data, as nccl-tests does."""

import time
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, NamedTuple

from hpc_mp.doctor.bench.ranks import pattern
from hpc_mp.planner.collectives import Collective, Counts, Placed

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
