"""NCCL and gloo, through torch.distributed; rank and rendezvous of this process, as of a job's ranks or told by the launcher."""

import json
import os
import socket
import time
from collections.abc import Callable, Mapping, Sequence
from datetime import timedelta
from itertools import pairwise
from typing import Any, TextIO

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.spec import THROUGH_LAUNCHER, BenchSpec, Voice
from hpc_mp.planner.collectives import Collective
from hpc_mp.rundir.rank_env import RankEnv, identity
from hpc_mp.train.rank.rendezvous import Rendezvous, rendezvous

TYPES = {"float": torch.float32, "double": torch.float64, "half": torch.float16, "bfloat16": torch.bfloat16, "int32": torch.int32}


class TorchNetwork:
    """A process group of all ranks, and one for each group of the measurement.

    Attributes:
        rank: index among all ranks.
        member, members: index in its group, and number of the ranks of the group.
        device: name of the one with the buffers.
        versions: those of the libraries, for the record.
    """

    def __init__(self, spec: BenchSpec, who: RankEnv, where: Rendezvous) -> None:
        """Create the process groups. Raises HpcMpError if there is no GPU for this rank."""
        self._device = _device(spec, who)
        wait = timedelta(seconds=spec.timeout)
        store: Any = dist.HashStore() if who.world == 1 else dist.TCPStore(
            where.address, where.port, who.world, is_master=who.rank == 0 and where.hosted, timeout=wait,
            master_listen_fd=where.listener if who.rank == 0 and where.hosted else None)
        # gloo beside NCCL: messages about the measurement do not use the measured network library
        dist.init_process_group("cpu:gloo,cuda:nccl" if spec.backend == "nccl" else "gloo", rank=who.rank, timeout=wait,
                                world_size=who.world, store=dist.PrefixStore(f"hpc-mp/bench/{where.secret}", store))
        self._dtype = TYPES[spec.dtype]
        self._group: Any = None
        self._odd: Any = None  # see _exchange
        self._ranks: tuple[int, ...] = ()
        for ranks in spec.groups:
            group = dist.group.WORLD if len(ranks) == who.world else dist.new_group(ranks, timeout=wait)
            odd = dist.new_group(ranks, timeout=wait) if (spec.collective, spec.backend) == ("sendrecv", "gloo") else group
            if who.rank in ranks:
                self._group, self._odd, self._ranks = group, odd, ranks
        self.rank, self._world = who.rank, who.world
        self.member, self.members = self._ranks.index(who.rank), len(self._ranks)
        gpu = self._device.type == "cuda"
        self.device = torch.cuda.get_device_name(self._device) if gpu else "cpu"
        self.versions = {"torch": str(torch.__version__)}
        if spec.backend == "nccl":
            nccl: Any = torch.cuda.nccl
            self.versions["nccl"] = ".".join(map(str, nccl.version()))

    def buffer(self, elements: int) -> Any:
        """Return a one-dimensional tensor on the device."""
        return torch.zeros(elements, dtype=self._dtype, device=self._device)

    def table(self, values: Any) -> Any:
        """Convert an array of float64 for comparison with a buffer."""
        return torch.from_numpy(values).to(self._dtype).to(self._device)

    def operation(self, collective: Collective, send: Any, receive: Any) -> Callable[[], object]:
        """Return a function that starts the operation in the group. In place both buffers overlap as in nccl-tests. torch's
        all-reduce and broadcast are in place: out of place a copy before them is included."""
        group = self._group
        operations: dict[str, Callable[[], object]] = {
            "all_reduce": lambda: dist.all_reduce(receive, group=group),
            "broadcast": lambda: dist.broadcast(receive, self._ranks[0], group=group),
            "all_gather": lambda: dist.all_gather_into_tensor(receive, send, group=group),
            "reduce_scatter": lambda: dist.reduce_scatter_tensor(receive, send, group=group),
            "all_to_all": lambda: dist.all_to_all_single(receive, send, group=group),
            "sendrecv": lambda: self._exchange(send, receive),
        }
        run = operations[collective.name]
        if collective.native == "in_place" and send.data_ptr() != receive.data_ptr():
            return lambda: (receive.copy_(send), run())
        return run

    def _exchange(self, send: Any, receive: Any) -> None:
        """Send to the next rank of the group and receive from the previous one, at the same time.

        In gloo odd members send through a separate group: gloo serialises two opposite messages on one connection (measured
        between two hosts at 200 Mbit/s: 110 instead of 191 Mbit/s each way).
        """
        after, before = (self.member + 1) % self.members, (self.member - 1) % self.members
        out = (send, self._ranks[after], self._odd if self.member % 2 else self._group)
        into = (receive, self._ranks[before], self._odd if before % 2 else self._group)
        if self._odd is self._group:
            works: list[Any] = dist.batch_isend_irecv([dist.P2POp(dist.isend, *out), dist.P2POp(dist.irecv, *into)])
        else:
            works = [dist.isend(*out), dist.irecv(*into)]
        for work in works:
            work.wait()

    def finish(self) -> None:
        """Wait for all started operations."""
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)

    def stamp(self) -> Any:
        """Return a timestamp of the device's clock."""
        if self._device.type != "cuda":
            return time.perf_counter()
        event: Any = torch.cuda.Event(enable_timing=True)  # type: ignore[no-untyped-call]
        event.record()
        return event

    def between(self, stamps: Sequence[Any]) -> list[float]:
        """Return the seconds between consecutive timestamps; call it after ``finish``."""
        if self._device.type != "cuda":
            return [after - before for before, after in pairwise(stamps)]
        return [before.elapsed_time(after) / 1e3 for before, after in pairwise(stamps)]

    def barrier(self) -> None:
        """Wait for all ranks of all groups."""
        dist.all_reduce(torch.zeros(1))

    def gather(self, value: Any) -> list[Any] | None:
        """Return the values of all ranks on rank 0, None elsewhere."""
        values: list[Any] | None = [None] * self._world if self.rank == 0 else None
        dist.gather_object(value, values, dst=0)
        return values

    def close(self) -> None:
        """Close the network after all ranks have finished."""
        dist.destroy_process_group()


def _device(spec: BenchSpec, who: RankEnv) -> torch.device:
    if spec.backend == "gloo":
        return torch.device("cpu")
    gpu_count = torch.cuda.device_count() if torch.cuda.is_available() else 0
    index = who.rank if os.environ.get("HPC_MP_EMULATED") == "1" else who.local_rank
    if index >= gpu_count:
        raise HpcMpError("--backend nccl", f"needs a GPU per rank: torch {torch.__version__} sees {gpu_count} on {who.node}, "
                         f"this is local rank {index}", "start fewer ranks per node, ask for GPUs, or choose --backend gloo")
    device = torch.device("cuda", index)
    torch.cuda.set_device(device)
    return device


def meet(spec: BenchSpec, voice: Voice, environ: Mapping[str, str], answers: TextIO) -> tuple[RankEnv, Rendezvous]:
    """Return this rank and the rendezvous. Raises HpcMpError if the number of processes is not the number of ranks."""
    who = identity(environ)
    if who.world != spec.world:
        raise HpcMpError(f"{who.world} ranks ({who.source})", f"the measurement has {spec.world}", "start that many")
    return who, _through_launcher(who, voice, answers) if environ.get(THROUGH_LAUNCHER) == "1" else rendezvous(None, environ)


def _through_launcher(who: RankEnv, voice: Voice, answers: TextIO) -> Rendezvous:
    """Meet through the launcher: rank 0 listens on a free port and reports it, the launcher writes it to all ranks' stdin. No
    port is guessed, and no file on shared storage is needed."""
    listener = None
    if who.rank == 0 and who.world > 1:
        server = socket.create_server(("", 0), backlog=who.world)
        listener = server.fileno()
        voice.say("meet", node=who.node, port=server.getsockname()[1])
        server.detach()
    elif who.world == 1:
        return Rendezvous("", 0, "alone")
    where = json.loads(answers.readline())
    return Rendezvous(where["address"], where["port"], where["token"], listener)
