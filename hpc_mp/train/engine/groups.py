"""Process groups of a run: the device mesh, pipeline neighbours, and the group of a tied weight."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import timedelta
from math import prod

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from hpc_mp.layout.placement import Placement
from hpc_mp.train.engine.pipeline import Neighbours

MESH_AXES = ("pp", "replicate", "shard", "tp")


@dataclass(frozen=True, slots=True)
class Groups:
    """All that a rank needs to talk to others. ``tied``: the ranks that hold the embedding and its copy at the head
    (None when there is no copy)."""

    mesh: DeviceMesh
    neighbours: Neighbours
    tied: dist.ProcessGroup | None


def build(
    placement: Placement, shard_degree: int, device: torch.device, backend: str, tied: bool, timeout: timedelta | None,
) -> Groups:
    """Make every group of the layout; all ranks call this at the same time.

    The mesh is ``arange(world)`` with its axes permuted as the order's letters say, so that every group ascends (other
    permutations are silently wrong on torch up to 2.13).

    Args:
        timeout: how long a message of a step may take; None for torch's default.
    """
    grid = _grid(placement, shard_degree)
    only = "nccl" if backend != "gloo" else None  # beside it torch would connect all ranks of a group over gloo too
    along = [grid.movedim(axis, -1).flatten(0, -2).tolist() for axis in range(grid.ndim)]
    groups = [_mine(ranks, timeout, only) for ranks in along]
    mesh = DeviceMesh.from_group([group for group in groups if group], device.type, grid, mesh_dim_names=MESH_AXES)

    through_host = device.type == "cuda" and backend == "gloo"
    pipelines = grid.flatten(1).t().tolist()
    neighbours = Neighbours((dist.get_rank(),), None, None, through_host)
    if placement.degrees.pipeline > 1:
        ranks = tuple(dist.get_process_group_ranks(mesh["pp"].get_group()))
        neighbours = Neighbours(ranks, mesh["pp"].get_group(), _mine(pipelines, timeout, only), through_host)
        _connect(neighbours, device)
    copied = tied and placement.degrees.pipeline > 1
    ends = _mine([[pipeline[0], pipeline[-1]] for pipeline in pipelines], timeout, only) if copied else None
    _check_group_ranks(mesh)
    return Groups(mesh, neighbours, ends)


def _grid(placement: Placement, shard_degree: int) -> torch.Tensor:
    """The rank at every coordinate of ``MESH_AXES``."""
    degrees = placement.degrees
    sizes = {"D": degrees.data, "P": degrees.pipeline, "C": degrees.context, "T": degrees.tensor}
    letters = placement.order if "C" in placement.order else placement.order.replace("T", "CT")
    grid = torch.arange(prod(sizes.values())).view([sizes[letter] for letter in letters])
    grid = grid.permute([letters.index(letter) for letter in "PDCT"])
    return grid.reshape(degrees.pipeline, degrees.data // shard_degree, shard_degree, degrees.tensor).contiguous()


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


def _mine(groups: list[list[int]], timeout: timedelta | None, backend: str | None) -> dist.ProcessGroup | None:
    """Make all groups (a collective call) and return the one that this rank is in."""
    mine = None
    for ranks in groups:
        group = dist.new_group(ranks, timeout=timeout, backend=backend)
        if dist.get_rank() in ranks:
            mine = group
    return mine


def check_coordinates(placement: Placement, shard_degree: int, rank: int) -> None:
    """The mesh to be made has the rank at the coordinates that the launcher wrote down. Raises RuntimeError."""
    place = placement.ranks[rank]
    pp, replicate, shard, tp = (_grid(placement, shard_degree) == rank).nonzero()[0].tolist()
    dp = replicate * shard_degree + shard
    if (place.pp, place.dp, place.tp) != (pp, dp, tp):
        raise RuntimeError(f"rank {rank}: placement.json says pp {place.pp} dp {place.dp} tp {place.tp}, "
                           f"its order {placement.order} pp {pp} dp {dp} tp {tp}")


def _check_group_ranks(mesh: DeviceMesh) -> None:
    for axis in MESH_AXES:
        if dist.get_rank(mesh[axis].get_group()) != mesh[axis].get_local_rank():
            raise RuntimeError(f"rank {dist.get_rank()}: its rank in the {axis} group is not its mesh coordinate")
