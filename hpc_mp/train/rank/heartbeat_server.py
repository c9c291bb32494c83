"""Rank 0's server of the heartbeat: it receives every node's beats and decides which nodes are lost."""

import secrets
import selectors
import socket
from collections.abc import Callable, Mapping, Set
from contextlib import suppress
from dataclasses import dataclass

from hpc_mp.train.rank.failures import NodeLost
from hpc_mp.train.rank.proof import proven
from hpc_mp.train.rank.stall_clock import StallAwareClock

BEAT, FAREWELL = b"b", b"f"
BEATS = 6  # per timeout
GRACE_S = 2.0  # after a first suspicion: failed ranks record their own failures meanwhile, and more nodes fall silent
START_S = 60.0  # extra time until the first sign of life
NONCE = 32  # bytes of the challenge to a new connection, which answers with its node and a proof
GREETING = 256  # limit of that answer in bytes


@dataclass(frozen=True, slots=True)
class NodeSilence:
    """Rank 0's view of the other nodes: seconds since the last sign of life, and the nodes whose connection broke."""

    silence: Mapping[int, float]
    broken: Set[int]


def suspects(silences: NodeSilence, timeout: float) -> tuple[frozenset[int], bool]:
    """Return the nodes to blame, and True if the judging node itself is the suspect.

    No node is blamed before one was silent for ``timeout`` or its connection broke. Then every node that missed half of the beats
    is blamed with it, because nodes behind one dead switch do not fall silent at the same moment. If all other nodes are silent,
    at least two of them, the judging node's own link is dead.
    """
    if not silences.broken and max(silences.silence.values(), default=0.0) < timeout:
        return frozenset(), False
    silent = {node for node, seconds in silences.silence.items() if seconds > timeout / 2 and node not in silences.broken}
    own = len(silent) == len(silences.silence) > 1
    return frozenset(silent | silences.broken), own


class Server:
    """The heartbeat's server in rank 0: one thread receives the beats of all nodes."""

    def __init__(self, own: int, names: Mapping[int, str], secret: str, timeout: float, lost: Callable[[NodeLost], None]) -> None:
        self.own, self.names, self.secret, self.timeout, self.lost = own, names, secret, timeout, lost
        self.tick = min(timeout / BEATS, GRACE_S)
        self.clock = StallAwareClock(self.tick)
        self.last_beat = {node: self.clock.now() + START_S for node in names if node != own}
        self.broken: set[int] = set()
        self.connected: dict[socket.socket, int] = {}
        self.greetings: dict[socket.socket, bytes] = {}
        self.challenges: dict[socket.socket, str] = {}
        self.due: float | None = None  # time at which a suspicion is judged
        self.bell, self.ringer = socket.socketpair()
        self.listener = socket.create_server(("", 0), backlog=len(names))
        self.port: int = self.listener.getsockname()[1]
        self.selector = selectors.DefaultSelector()

    def close(self) -> None:
        self.ringer.send(FAREWELL)

    def run(self) -> None:
        self.listener.setblocking(False)
        self.selector.register(self.listener, selectors.EVENT_READ, self._accept)
        self.selector.register(self.bell, selectors.EVENT_READ)
        judged = self.clock.now()
        while True:
            for key, _ in self.selector.select(self.tick):
                if key.fileobj is self.bell:
                    return self._take_leave()
                key.data(key.fileobj)
            now = self.clock.now()
            if now - judged >= self.tick / 2:
                judged = now
                error = self._judge(now)
                if error is not None:
                    self._take_leave()
                    return self.lost(error)

    def _accept(self, listener: socket.socket) -> None:
        with suppress(OSError):
            connection, _ = listener.accept()
            connection.setblocking(False)
            challenge = secrets.token_hex(NONCE // 2)
            connection.send(challenge.encode())
            self.greetings[connection], self.challenges[connection] = b"", challenge
            self.selector.register(connection, selectors.EVENT_READ, self._receive)

    def _receive(self, connection: socket.socket) -> None:
        try:
            data = connection.recv(4096)
        except BlockingIOError:
            return
        except OSError:
            data = b""
        if connection in self.greetings:
            data = self._greet(connection, data)
        node = self.connected.get(connection)
        if node is None:
            return
        if FAREWELL in data or not data:
            self._drop(connection)
            if data:
                self.last_beat.pop(node, None)
            else:
                self.broken.add(node)
            return
        self.last_beat[node] = self.clock.now()
        with suppress(OSError):  # the next read will show the error
            connection.send(BEAT)

    def _greet(self, connection: socket.socket, data: bytes) -> bytes:
        """Close connections of strangers and of ranks of another attempt. Return the bytes that follow the greeting."""
        greeting = self.greetings[connection] + data
        line, end, rest = greeting.partition(b"\n")
        if not end and data and len(greeting) < GREETING:
            self.greetings[connection] = greeting
            return b""
        proof, _, number = line.decode(errors="replace").rpartition(" ")
        valid = number.isdecimal() and int(number) in self.last_beat
        if not valid or not proven(self.secret, proof, "heartbeat", self.challenges[connection], number):
            self._drop(connection)
            return b""
        del self.greetings[connection]
        self.connected[connection] = int(number)
        return rest or BEAT

    def _drop(self, connection: socket.socket) -> None:
        self.selector.unregister(connection)
        self.greetings.pop(connection, None)
        self.challenges.pop(connection, None)
        self.connected.pop(connection, None)
        connection.close()

    def _judge(self, now: float) -> NodeLost | None:
        silences = NodeSilence({node: now - last for node, last in self.last_beat.items()}, self.broken)
        nodes, own = suspects(silences, self.timeout)
        if not nodes:
            self.due = None
            return None
        if self.due is None:
            self.due = now + GRACE_S
        if now < self.due:
            return None
        blamed = tuple(self.names[node] for node in ([self.own] if own else sorted(nodes)))
        if own:
            reason = f"all other nodes have given no sign of life for {self.timeout:g} s: the link of {blamed[0]} is suspected"
        elif self.broken:
            reason = f"the connection to {', '.join(blamed)} broke"
        else:
            reason = f"{', '.join(blamed)} gave no sign of life for {self.timeout:g} s"
        return NodeLost(reason, blamed, silent=not self.broken)

    def _take_leave(self) -> None:
        for connection in list(self.connected):
            with suppress(OSError):
                connection.send(FAREWELL)
            self._drop(connection)
        self.listener.close()
