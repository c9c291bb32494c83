"""Sockets and checkpoint files of a rank, and the host memory it needs to load and save."""

from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path

import torch

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.layout.models import Family, ModelShape, family_of
from hpc_mp.layout.models.weight_files import find, weight_files
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.checkpoint_index import BLOCK, INDEX
from hpc_mp.train.checkpoint.background import snapshot_bytes
from hpc_mp.train.checkpoint.checkpoint import SHARD, lists_stage, parts_to_write
from hpc_mp.train.checkpoint.shard_file import PIECE, shard_bytes
from hpc_mp.train.parallel.communicators import CHANNEL_CTAS
from hpc_mp.train.parallel.data_axis import Unit
from hpc_mp.train.parallel.fill import CHUNK
from hpc_mp.train.parallel.groups import Groups
from hpc_mp.train.step.engine import Engine

# Of NCCL: a connection has buffers for the protocols Simple, LL128 and LL (DEFAULT_BUFFSIZE, DEFAULT_LL128_BUFFSIZE and
# DEFAULT_LL_BUFFSIZE in src/init.cc). A ring and a tree have one connection each for every thread block, of which a collective
# takes about so many inside a node with NVLink; NCCL chooses by the machine.
CONNECTION_BYTES = (1 << 22) + 120 * 640 * 8 * 8 + 8 * 512 * 8 * 16
CONNECTIONS, COLLECTIVE_CTAS = 2, 16
DEVICE = 4  # descriptors of a gloo device: a listening socket, both ends of a pipe, and an epoll


@dataclass(frozen=True, slots=True)
class OpenSockets:
    """Connections of a rank after all groups are made."""

    gloo: int  # one to each other rank of every group that gloo connects
    store: int  # connections to the rendezvous; rank 0 has one for each rank, and its own
    heartbeat: int  # connections between the nodes' first ranks and rank 0
    descriptors: int  # all of these, and the other descriptors of gloo
    nccl: int  # communicators of NCCL; what each of them opens depends on the machine
    buffers: int  # bytes of the device that their buffers take, estimated for the defaults of NCCL


@dataclass(frozen=True, slots=True)
class Loading:
    """Reads at the start of a run. ``weights``: files of ``model.pretrained`` that hold what this rank needs; None if the files
    do not exist here. ``checkpoint``: files of a checkpoint that this layout saved: this rank's own, and the index of every
    stage. ``first_values``, ``restored``: peak bytes on the host while values are drawn or read from files, and while a
    checkpoint is read."""

    weights: tuple[str, ...] | None
    checkpoint: tuple[str, ...]
    first_values: int
    restored: int


@dataclass(frozen=True, slots=True)
class Saving:
    """Writes of this rank at each checkpoint: its files, its shard's bytes, and the bytes of them that are copied to the host at
    once, on a GPU or for a checkpoint in the background."""

    files: tuple[str, ...]
    bytes: int
    host: int


def open_sockets(groups: Groups, placement: Placement, rank: int, timeout: float) -> OpenSockets:
    """Return the connections of a rank. ``timeout``: the heartbeat's timeout; 0 means no heartbeat."""
    world, nodes = len(placement.ranks), placement.nodes
    sizes = [axis.size for axis in (groups.tensor, groups.context, groups.shard, groups.replicate, *groups.ties.values(),
                                    groups.kv, groups.expert, groups.experts.shard, groups.experts.replicate) if axis.size > 1]
    sizes += [2] * len(groups.channels.groups)
    facts = [axis.size for axis in (groups.host.block, groups.host.heads) if axis.size > 1]  # over gloo, beside NCCL too
    by_gloo = facts + sizes if groups.channels.through_host else facts
    gloo, store = sum(size - 1 for size in by_gloo), world + 1 if rank == 0 else 1
    beating = bool(timeout) and nodes > 1
    first = placement.ranks[rank].local_rank == 0 and placement.ranks[rank].node != placement.ranks[0].node
    heartbeat = (nodes - 1 if rank == 0 else int(first)) if beating else 0
    descriptors = gloo + store + heartbeat + (DEVICE if gloo else 0)
    if groups.channels.through_host:
        return OpenSockets(gloo, store, heartbeat, descriptors, 0, 0)
    between_stages = len(groups.channels.groups)
    collective = 1 + len(sizes) - between_stages
    buffers = (collective * CONNECTIONS * COLLECTIVE_CTAS + between_stages * CHANNEL_CTAS) * CONNECTION_BYTES
    return OpenSockets(gloo, store, heartbeat, descriptors, 1 + len(sizes), buffers)


def loading(spec: JobSpec, shape: ModelShape, engine: Engine, rank: int) -> Loading:
    units = list(engine.data.units.values())
    pieces = [piece for unit in units for piece in unit.layout.pieces(unit.shard.rank)]
    values = torch.float32.itemsize * min(CHUNK, max((piece.size for piece in pieces), default=0))
    largest = max((item.values.nbytes for item in engine.held()), default=0)
    indexes = tuple(INDEX.format(stage=place) for place in range(spec.parallel.pipeline))
    return Loading(_weights(spec, family_of(shape), units), (SHARD.format(number=rank + 1), *indexes),
                   values, BLOCK + min(PIECE, largest))


def _weights(spec: JobSpec, family: Family, units: Iterable[Unit]) -> tuple[str, ...] | None:
    if spec.model.pretrained is None:
        return ()
    try:
        files = weight_files(Path(spec.model.pretrained))
    except HpcMpError:
        return None
    names = {find(piece.slot.weight.name, files, family) for unit in units for piece in unit.layout.pieces(unit.shard.rank)}
    return tuple(sorted({files[name].name for name in names if name is not None}))


def saving(engine: Engine, groups: Groups, rank: int, on_gpu: bool, background: bool) -> Saving:
    parts = parts_to_write(engine.held())
    size = shard_bytes(parts)
    files = [SHARD.format(number=rank + 1)] if size else []
    if lists_stage(groups):
        files.append(INDEX.format(stage=groups.pipeline))
    piece = min(PIECE, max((part.values.nbytes for part in parts), default=0)) if on_gpu else 0
    return Saving(tuple(files), size, snapshot_bytes(parts) if background else piece)
