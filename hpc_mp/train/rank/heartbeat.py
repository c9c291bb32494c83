"""Heartbeats between nodes: they detect a node that vanished without closing its connections.

On every node, the process with local rank 0 sends several beats per ``timeout`` to rank 0's process, which echoes them. Rank 0
names the nodes that are silent; a node that gets no echo names rank 0's node. A process that leaves in order announces it.
"""

import selectors
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

from hpc_mp.layout.placement import Placement
from hpc_mp.train.rank.failures import NodeLost
from hpc_mp.train.rank.heartbeat_server import BEAT, BEATS, FAREWELL, GRACE_S, NONCE, START_S, Server
from hpc_mp.train.rank.proof import SignedKeys, digest
from hpc_mp.train.rank.rendezvous import Rendezvous, seat
from hpc_mp.train.rank.stall_clock import StallAwareClock

Lost = Callable[[NodeLost], None]
CONNECT_S = 10.0  # for one attempt to connect


@contextmanager
def heartbeat(placement: Placement, rank: int, where: Rendezvous, store: SignedKeys, timeout: float,
              lost: Lost) -> Iterator[None]:
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


def _part(placement: Placement, rank: int, where: Rendezvous, store: SignedKeys, timeout: float,
          lost: Lost) -> "Server | Client | None":
    mine, first = placement.ranks[rank], placement.ranks[0]
    if rank == 0:
        names = {place.node: store.get(seat(place.rank)) for place in placement.ranks if place.local_rank == 0}
        hearing = Server(mine.node, names, where.secret, timeout, lost)
        store.set("heartbeat", str(hearing.port))
        return hearing
    if mine.local_rank == 0 and mine.node != first.node:
        server = where.address, int(store.get("heartbeat"))
        return Client(server, mine.node, store.get(seat(0)), where.secret, timeout, lost)
    return None


class Client:
    """The heartbeat's client on a node other than rank 0's. It waits a little longer for the echo than rank 0 for a beat: rank 0
    gets all nodes' beats and must report first. ``server``: the address that rank 0 listens on. ``node``: the number of this
    node. ``name``: the name of rank 0's node."""

    def __init__(self, server: tuple[str, int], node: int, name: str, secret: str, timeout: float, lost: Lost) -> None:
        self.server, self.name, self.timeout, self.lost = server, name, timeout, lost
        self.node, self.secret = str(node), secret
        self.closed = threading.Event()
        self.bell, self.ringer = socket.socketpair()

    def close(self) -> None:
        self.closed.set()
        self.ringer.send(FAREWELL)

    def run(self) -> None:
        error = self._beat()
        if error is not None and not self.closed.wait(0.0 if error.facts["silent"] else GRACE_S):
            self.lost(error)

    def _beat(self) -> NodeLost | None:
        """Send beats until the end, or until rank 0 no longer answers."""
        tick = self.timeout / BEATS
        clock = StallAwareClock(tick)
        last_echo = clock.now()
        connection = self._connect()
        if connection is None:
            return None if self.closed.is_set() else self._silence()
        with connection, selectors.DefaultSelector() as selector:
            selector.register(connection, selectors.EVENT_READ)
            selector.register(self.bell, selectors.EVENT_READ)
            while clock.now() - last_echo < self.timeout + 2 * GRACE_S:
                ready = [key.fileobj for key, _ in selector.select(tick)]
                try:
                    if self.bell in ready:
                        connection.send(FAREWELL)
                        return None
                    if connection in ready:
                        last_echo = clock.now()
                        if FAREWELL in (reply := connection.recv(4096)):
                            return None
                        if not reply:
                            raise ConnectionResetError
                    else:
                        connection.send(BEAT)
                except BlockingIOError:
                    continue  # no process receives the beats: that counts as silence
                except OSError:
                    return NodeLost(f"the connection to {self.name} broke", (self.name,), silent=False)
        return self._silence()

    def _silence(self) -> NodeLost:
        return NodeLost(f"{self.name} gave no sign of life for {self.timeout:g} s", (self.name,), silent=True)

    def _connect(self) -> socket.socket | None:
        """Return a connection after the greeting was sent; None if none could be made in time."""
        deadline = time.monotonic() + START_S
        while time.monotonic() < deadline and not self.closed.is_set():
            try:
                connection = socket.create_connection(self.server, timeout=CONNECT_S)
                connection.sendall(greeting(self.secret, self.node, _challenge(connection)))
                connection.setblocking(False)
                return connection
            except OSError:
                self.closed.wait(1.0)
        return None


def greeting(secret: str, node: str, challenge: str) -> bytes:
    """Return the answer to the server's challenge: a node's number, with a proof that it belongs to this start."""
    return f"{digest(secret, 'heartbeat', challenge, node)} {node}\n".encode()


def _challenge(connection: socket.socket) -> str:
    """Read the server's challenge. Raises OSError if the server closes before it is complete."""
    challenge = b""
    while len(challenge) < NONCE:
        if not (more := connection.recv(NONCE - len(challenge))):
            raise ConnectionResetError
        challenge += more
    return challenge.decode(errors="replace")
