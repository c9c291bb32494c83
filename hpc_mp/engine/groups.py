"""Process groups of a run: rendezvous, the device mesh, pipeline neighbours, and the group of a tied weight."""

from __future__ import annotations

import os
from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_mp.engine.identity import Identity
from hpc_mp.engine.pipeline import Neighbours
from hpc_mp.errors import HpcMpError
from hpc_mp.placement import Placement

MESH_AXES = ("pp", "replicate", "shard", "tp")
START_TIMEOUT = timedelta(minutes=10)  # for all ranks to meet
FILES_TIMEOUT = timedelta(hours=24)  # rank 0 may have terabytes to tokenize, or a checkpoint of terabytes to verify


@dataclass(frozen=True, slots=True)
class Groups:
    """All that a rank needs to talk to others. ``tied``: the ranks that hold the embedding and its copy at the head
    (None when there is no copy)."""

    mesh: DeviceMesh
    neighbours: Neighbours
    tied: dist.ProcessGroup | None


def choose_device(asked: str, who: Identity, ranks_per_node: int) -> tuple[torch.device, str]:
    """The device of this rank and the communication backend. ``auto`` takes a GPU when every rank of the machine gets
    one; ``cuda`` with fewer GPUs shares them, over gloo. All emulated nodes are one machine.

    Raises:
        HpcMpError: when cuda is asked for and there is none.
    """
    emulated = os.environ.get("HPC_MP_EMULATED") == "1"
    here, ranks = (who.rank, who.world) if emulated else (who.local_rank, ranks_per_node)
    found = torch.cuda.device_count() if asked != "cpu" and torch.cuda.is_available() else 0
    if asked == "cpu" or (asked == "auto" and found < ranks):
        return torch.device("cpu"), "gloo"
    if found == 0:
        raise HpcMpError("job.device = cuda", f"torch {torch.__version__} sees no GPU on {who.node}",
                         "install a CUDA build of torch and a driver, or set job.device = \"cpu\"")
    device = torch.device("cuda", here % found)
    torch.cuda.set_device(device)
    return device, "cpu:gloo,cuda:nccl" if found >= ranks else "gloo"


def meet(who: Identity, backend: str) -> dist.Store:
    """Rendezvous at MASTER_ADDR:MASTER_PORT and make the default process group; returns the store.

    In the default group ranks wait for each other's files too (``FILES_TIMEOUT``); a rank that hangs while it computes
    is noticed by its neighbours in the groups of the mesh, which have torch's own timeouts.

    The emulator hands rank 0 a socket that already listens (HPC_MP_LISTEN_FD), so that nobody can take the port.
    """
    address = os.environ.get("MASTER_ADDR", "127.0.0.1")
    port = int(os.environ.get("MASTER_PORT", "0"))
    listening = os.environ.get("HPC_MP_LISTEN_FD")
    store: dist.Store
    if who.world == 1:
        store = dist.HashStore()
    elif os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        store = dist.TCPStore(address, port, who.world, is_master=False, timeout=START_TIMEOUT)
    else:
        store = dist.TCPStore(address, port, who.world, is_master=who.rank == 0, timeout=START_TIMEOUT,
                              master_listen_fd=int(listening) if listening and who.rank == 0 else None)
    token = f"{os.environ.get('SLURM_JOB_ID', '')}.{os.environ.get('SLURM_RESTART_COUNT', '0')}"
    dist.init_process_group(backend, store=dist.PrefixStore(f"hpc-mp/{token}", store), rank=who.rank, world_size=who.world,
                            timeout=FILES_TIMEOUT)
    return store


def build(placement: Placement, shard_degree: int, device: torch.device, backend: str, tied: bool) -> Groups:
    """Make every group of the layout; all ranks call this at the same time.

    The mesh is ``arange(world)`` with its axes permuted as the order's letters say, so that every group ascends (other
    permutations are silently wrong on torch up to 2.13).
    """
    degrees = placement.degrees
    sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
    letters = placement.order if "C" in placement.order else placement.order.replace("T", "CT")
    grid = torch.arange(prod(sizes.values())).view([sizes[letter] for letter in letters])
    grid = grid.permute([letters.index(letter) for letter in "PDCT"])
    shape = (degrees.pipeline, degrees.data // shard_degree, shard_degree, degrees.tensor)
    mesh = DeviceMesh(device.type, grid.reshape(shape), mesh_dim_names=MESH_AXES)

    through_host = device.type == "cuda" and backend == "gloo"
    neighbours = Neighbours((dist.get_rank(),), None, None, through_host)
    if degrees.pipeline > 1:
        backward = _mine(list(mesh.mesh.flatten(1).t().tolist()))
        ranks = tuple(dist.get_process_group_ranks(mesh["pp"].get_group()))
        neighbours = Neighbours(ranks, mesh["pp"].get_group(), backward, through_host)
        _connect(neighbours, device)
    pairs = [[int(pipeline[0]), int(pipeline[-1])] for pipeline in mesh.mesh.flatten(1).t().tolist()]
    ends = _mine(pairs) if tied and degrees.pipeline > 1 else None
    _assert_coordinates(placement, mesh)
    return Groups(mesh, neighbours, ends)


def _connect(neighbours: Neighbours, device: torch.device) -> None:
    """Let neighbours exchange one number each way, the pairs (0, 1), (2, 3) … first.

    NCCL connects two ranks at their first message, and both wait there. Inside a step, where receives are posted ahead
    of what they answer, two ranks could so wait for each other for ever.
    """
    number = torch.zeros(1, device="cpu" if neighbours.through_host else device)
    stage = neighbours.ranks.index(dist.get_rank())
    for parity in (0, 1):
        if stage % 2 == parity and stage + 1 < len(neighbours.ranks):
            dist.send(number, neighbours.ranks[stage + 1], group=neighbours.forward)
            dist.recv(number, neighbours.ranks[stage + 1], group=neighbours.backward)
        elif stage % 2 != parity and stage > 0:
            dist.recv(number, neighbours.ranks[stage - 1], group=neighbours.forward)
            dist.send(number, neighbours.ranks[stage - 1], group=neighbours.backward)


def _mine(groups: list[list[int]]) -> dist.ProcessGroup | None:
    """Make all groups (a collective call) and return the one that this rank is in."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def _assert_coordinates(placement: Placement, mesh: DeviceMesh) -> None:
    """The mesh's coordinates must be those that the launcher wrote down, and each group's rank its mesh coordinate."""
    rank = dist.get_rank()
    place = placement.ranks[rank]
    pp, replicate, shard, tp = mesh.get_coordinate() or ()
    dp = replicate * mesh["shard"].size() + shard
    if (place.pp, place.dp, place.tp) != (pp, dp, tp):
        raise RuntimeError(f"rank {rank}: placement.json says pp {place.pp} dp {place.dp} tp {place.tp}, "
                           f"the mesh pp {pp} dp {dp} tp {tp}")
    for axis in MESH_AXES:
        if dist.get_rank(mesh[axis].get_group()) != mesh[axis].get_local_rank():
            raise RuntimeError(f"rank {rank}: its rank in the {axis} group is not its mesh coordinate")
