"""The client of the heartbeat on every other node: it sends beats and listens for rank 0's echo."""

from __future__ import annotations

import selectors
import socket
import threading
import time
from collections.abc import Callable

from hpc_mp.train.rank.failures import NodeLost
from hpc_mp.train.rank.heartbeat_server import BEAT, BEATS, FAREWELL, GRACE_S, NONCE, START_S
from hpc_mp.train.rank.proof import digest
from hpc_mp.train.rank.stall_clock import StallAwareClock

CONNECT_S = 10.0  # for one attempt to connect


class Client:
    """The heartbeat's client on a node other than rank 0's.

    It waits a little longer for the echo than rank 0 for a beat: rank 0 gets all nodes' beats and must report first.

    Args:
        server: the address that rank 0 listens on.
        node: the number of this node.
        name: the name of rank 0's node.
        alone: True if only these two nodes exist.
    """

    def __init__(self, server: tuple[str, int], node: int, name: str, alone: bool, secret: str, timeout: float,
                 lost: Callable[[NodeLost], None]) -> None:
        self.server, self.name, self.alone, self.timeout, self.lost = server, name, alone, timeout, lost
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
        return NodeLost(f"{self.name} gave no sign of life for {self.timeout:g} s", (self.name,), silent=True,
                        ambiguous=self.alone)

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
