"""Heartbeats between nodes: they detect a node that vanished without closing its connections.

On every node, the process with local rank 0 sends several beats per ``timeout`` to rank 0's process, which echoes them. Rank 0
names the nodes that are silent; a node that gets no echo names rank 0's node. A process that leaves in order announces it.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpc_mp.layout.placement import Placement
from hpc_mp.train.rank.failures import NodeLost
from hpc_mp.train.rank.heartbeat_client import Client
from hpc_mp.train.rank.heartbeat_server import GRACE_S, Server
from hpc_mp.train.rank.proof import SignedKeys
from hpc_mp.train.rank.rendezvous import Rendezvous, seat

Lost = Callable[[NodeLost], None]


@contextmanager
def heartbeat(
    placement: Placement, rank: int, where: Rendezvous, store: SignedKeys, timeout: float, lost: Lost,
) -> Iterator[None]:
    """Send heartbeats while the block runs, and take leave at its end.

    Args:
        where: the rendezvous of all ranks, on rank 0's host.
        store: the keys with rank 0's port and every rank's node.
        timeout: seconds of silence after which a node counts as lost; 0 = never.
        lost: called in a separate thread.
    """
    part = _part(placement, rank, where, store, timeout, lost) if timeout and placement.nodes > 1 else None
    if part is None:
        yield
        return
    thread = threading.Thread(target=part.run, name="heartbeat", daemon=True)
    thread.start()
    try:
        yield
    finally:
        part.close()
        thread.join(GRACE_S)


def _part(
    placement: Placement, rank: int, where: Rendezvous, store: SignedKeys, timeout: float, lost: Lost,
) -> Server | Client | None:
    mine, first = placement.ranks[rank], placement.ranks[0]
    if rank == 0:
        names = {place.node: store.get(seat(place.rank)) for place in placement.ranks if place.local_rank == 0}
        hearing = Server(mine.node, names, where.secret, timeout, lost)
        store.set("heartbeat", str(hearing.port))
        return hearing
    if mine.local_rank == 0 and mine.node != first.node:
        server = where.address, int(store.get("heartbeat"))
        return Client(server, mine.node, store.get(seat(0)), placement.nodes == 2, where.secret, timeout, lost)
    return None
