"""Transfers of one pair over TCP: one direction after the other, all rails and streams of a direction at the same time; and
probes of the MTU: full-size UDP packets with the don't-fragment bit, which need no privilege.

One peer connects for both directions. The sender closes the connection when it has enough samples. The rate is the median of its
kernel's delivery rates: if other processes take the CPU, bytes per second of wall time say little about a link.
"""

import itertools
import socket
import struct
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from statistics import median

HEADERS = 28  # bytes of IPv4 and UDP
MARK = struct.Struct("!16sHBB")  # token, peer, attempt, small or full
IP_MTU_DISCOVER, IP_PMTUDISC_PROBE = 10, 3  # linux/in.h: don't fragment, and ask only the interface for its MTU
TRIES = 6  # so that a lossy link does not look like one with a small MTU
PAUSE_S = 0.03
LAST_S = 0.4  # seconds to wait for the last answer
SMALL = 128  # bytes of a packet that fits any link


@dataclass(frozen=True, slots=True)
class Probed:
    """The number of small and of full packets in one direction that came back as an echo, of ``TRIES``."""

    small: int
    full: int


def listener(port: int) -> socket.socket:
    """Return the UDP socket that answers probes, bound on all interfaces."""
    answering = socket.socket(socket.AF_INET, socket.SOCK_DGRAM)
    answering.bind(("", port))
    return answering


def start_echo(answering: socket.socket) -> None:
    """Start a thread that answers every probe with its first bytes."""
    threading.Thread(target=_echo, args=(answering,), daemon=True).start()


def probe(mine: str, peers: Sequence[tuple[str, int]], size: int, token: str) -> list[Probed]:
    """Send packets of ``size`` bytes (IP header included) from the own address to all peers (address and port of each)."""
    echoes: set[tuple[int, int, int]] = set()
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as sender:
        sender.setsockopt(socket.IPPROTO_IP, IP_MTU_DISCOVER, IP_PMTUDISC_PROBE)
        sender.bind((mine, 0))
        for attempt in range(TRIES):
            for full, length in enumerate((SMALL, size)):
                for number, peer in enumerate(peers):
                    packet = MARK.pack(token.encode(), number, attempt, full).ljust(length - HEADERS, b".")
                    with suppress(OSError):  # larger than our own interface's MTU, or no route
                        sender.sendto(packet, peer)
            _collect(sender, token.encode(), echoes, time.monotonic() + (LAST_S if attempt == TRIES - 1 else PAUSE_S))
    def count(number: int, full: int) -> int:
        return sum((number, attempt, full) in echoes for attempt in range(TRIES))

    return [Probed(count(number, 0), count(number, 1)) for number in range(len(peers))]


def _collect(sender: socket.socket, token: bytes, echoes: set[tuple[int, int, int]], until: float) -> None:
    while (remaining := until - time.monotonic()) > 0:
        sender.settimeout(remaining)
        with suppress(OSError, struct.error):  # timeout, port unreachable, or a foreign packet
            packet_token, number, attempt, full = MARK.unpack(sender.recv(MARK.size))
            if packet_token == token:
                echoes.add((number, attempt, full))


def _echo(answering: socket.socket) -> None:
    while True:
        packet, peer = answering.recvfrom(65536)
        if len(packet) >= MARK.size:
            with suppress(OSError):
                answering.sendto(packet[: MARK.size], peer)


HEADER = struct.Struct("!16sIBBB")  # token, order number, rail, stream, direction: 0 = the caller sends
BLOCK = 64 * 1024
SAMPLE_S = 0.001  # least interval between two samples of the kernel's rate
SAMPLES = 12  # needed for the median; with fewer samples a transfer goes on for up to ``LONGER`` times as long
LONGER = 3
PACKET = 1024  # bytes of a paced write: one segment on any link
LATE_S = 0.5  # greatest delay between the peers' receipt of an order
WARM_S = 0.15  # warm-up seconds of a transfer that are not counted
HANG_UP = struct.pack("ii", 1, 0)  # for SO_LINGER: unread and unsent data is discarded


@dataclass(frozen=True, slots=True)
class TransferPlan:
    """Parameters of a transfer, shared by both sides."""

    token: str  # of the survey, 16 characters; callers without it are not served
    order: int  # its number
    seconds: float  # counted seconds in each direction
    patience: float  # timeout in seconds to answer a call; after that a peer may pause for twice as long
    streams: int = 1  # connections per rail and direction
    packets: int = 0  # segments per second and connection; 0 = at full speed

    @property
    def longest(self) -> float:
        """The maximum duration of one direction in seconds, once its call has been answered."""
        return WARM_S + LONGER * self.seconds + self.pause

    @property
    def pause(self) -> float:
        return 2 * self.patience

    @property
    def within(self) -> float:
        """The maximum duration in seconds for both peers, even after failures."""
        return 2 * (self.patience + self.longest)


@dataclass(frozen=True, slots=True)
class Key:
    """The key of a connection. ``direction``: 0 = the caller sends, 1 = it receives."""

    rail: int
    stream: int
    direction: int


@dataclass(frozen=True, slots=True)
class TransferEnd:
    """The result of one end of a connection; a receiver has only its error."""

    key: Key
    rate: float = 0.0  # bytes per second
    segments: int = 0  # this and the next as in ``Info``
    lost: int = 0
    why: str = ""  # the error, "" if there was none


def call(plan: TransferPlan, addresses: Sequence[tuple[str, str, int]]) -> list[TransferEnd]:
    """Call the peer for both directions. ``addresses``: own address, the peer's address and its port, for every rail."""
    def connect(key: Key) -> TransferEnd:
        mine, theirs, port = addresses[key.rail]
        with socket.create_connection((theirs, port), plan.patience, (mine, 0)) as connection:
            connection.settimeout(plan.pause)
            connection.sendall(HEADER.pack(plan.token.encode(), plan.order, key.rail, key.stream, key.direction))
            if key.direction:
                _pull(connection, plan)
                return TransferEnd(key)
            _exactly(connection, 1)  # the peer serves: without it the kernel alone would take the first bytes
            return _push(connection, plan, key)

    ends = []
    with ThreadPoolExecutor(len(addresses) * plan.streams) as pool:
        for direction in (0, 1):
            keys = [key for key in _keys(len(addresses), plan.streams) if key.direction == direction]
            ends += _gathered([(key, pool.submit(connect, key)) for key in keys])
            if all(end.why for end in ends):  # the other direction would only time out too
                break
    return ends


def answer(plan: TransferPlan, listener: socket.socket, rails: int) -> list[TransferEnd]:
    """Serve the peer's calls until all have come, or no call has come within the timeout."""
    def serve(connection: socket.socket, key: Key) -> TransferEnd:
        with connection:
            if key.direction:
                return _push(connection, plan, key)
            connection.sendall(b"!")
            _pull(connection, plan)
            return TransferEnd(key)

    missing = set(_keys(rails, plan.streams))
    served: list[tuple[Key, Future[TransferEnd]]] = []
    with ThreadPoolExecutor(len(missing)) as pool:
        for connection, key in _calls(plan, listener):
            if key not in missing:
                connection.close()
                continue
            served.append((key, pool.submit(serve, connection, key)))
            missing.discard(key)
            if not missing:
                break
        ends = _gathered(served)
    return [*ends, *(TransferEnd(key, why="no call came") for key in missing)]


def _calls(plan: TransferPlan, listener: socket.socket) -> Iterator[tuple[socket.socket, Key]]:
    """Yield the calls for this transfer until no more come within the timeout."""
    end = time.monotonic() + plan.patience + LATE_S
    while (remaining := end - time.monotonic()) > 0:
        listener.settimeout(remaining)
        try:
            connection, _ = listener.accept()
            connection.settimeout(plan.pause)
            greeting = _exactly(connection, HEADER.size)
        except OSError:
            continue
        token, order, rail, stream, direction = HEADER.unpack(greeting)
        if (token.decode("ascii", "replace"), order) != (plan.token, plan.order):  # a late or foreign call
            connection.close()
            continue
        end = time.monotonic() + plan.longest
        yield connection, Key(rail, stream, direction)


def _push(connection: socket.socket, plan: TransferPlan, key: Key) -> TransferEnd:
    """Send for the planned time. Raises OSError if the receiver stops reading."""
    connection.settimeout(plan.pause)
    connection.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, HANG_UP)
    connection.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
    block = memoryview(bytes(PACKET if plan.packets else BLOCK))
    begin, samples = time.monotonic(), list[tuple[float, Info]]()
    for count in itertools.count(1):
        if plan.packets:
            time.sleep(max(0.0, begin + count / plan.packets - time.monotonic()))
        connection.send(block)
        now = time.monotonic()
        if now - begin > WARM_S and (not samples or now - samples[-1][0] > SAMPLE_S):
            samples.append((now, info(connection)))
            if _enough(samples, plan):
                break
    (since, first), (until, last) = samples[0], samples[-1]
    rates = [sample.rate for _, sample in samples if sample.rate is not None]
    rate = median(rates) if len(rates) >= SAMPLES else (last.acked - first.acked) / (until - since)
    return TransferEnd(key, rate, last.segments, last.lost)


def _enough(samples: "Sequence[tuple[float, Info]]", plan: TransferPlan) -> bool:
    passed = samples[-1][0] - samples[0][0]
    count = sum(sample.rate is not None for _, sample in samples)
    return passed >= plan.seconds and (plan.packets > 0 or count >= SAMPLES or passed >= LONGER * plan.seconds)


def _pull(connection: socket.socket, plan: TransferPlan) -> None:
    """Receive until the sender closes the connection. Raises OSError if no data comes."""
    connection.settimeout(plan.pause)
    buffer = bytearray(4 * BLOCK)
    if not connection.recv_into(buffer):
        raise ConnectionError("the sender has hung up")
    with suppress(ConnectionResetError):
        while connection.recv_into(buffer):
            pass


def _exactly(connection: socket.socket, count: int) -> bytes:
    parts = b""
    while len(parts) < count:
        part = connection.recv(count - len(parts))
        if not part:
            raise ConnectionError("the peer has hung up")
        parts += part
    return parts


def _keys(rails: int, streams: int) -> list[Key]:
    return [Key(rail, stream, direction) for direction in (0, 1) for rail in range(rails) for stream in range(streams)]


def _gathered(running: Sequence[tuple[Key, Future[TransferEnd]]]) -> list[TransferEnd]:
    """Return the result of each transfer, with an OSError's message as its ``why``."""
    ends = []
    for key, future in running:
        try:
            ends.append(future.result())
        except OSError as error:
            ends.append(TransferEnd(key, why=error.strerror or str(error)))
    return ends


# Fields of ``struct tcp_info`` of linux/tcp.h, which are only ever added: offsets in bytes.
FLAGS, RETRANSMITTED, ACKED, SEGMENTS, DELIVERY_RATE, NEEDLESS = 7, 100, 120, 156, 160, 216
SENDER_IDLE = 1  # flag: the delivery rate was limited by a sender without data to send
SIZE = 220  # bytes that Linux 5.0 and newer return


@dataclass(frozen=True, slots=True)
class Info:
    """The state of a sending connection at one moment."""

    acked: int  # bytes that have arrived
    segments: int  # data segments sent, including retransmissions
    lost: int  # retransmitted segments, without those that the receiver reported as duplicates
    rate: float | None  # last delivery rate in bytes per second; None if the sender did not fill the path


def info(connection: socket.socket) -> Info:
    """Return the state of a connection. Raises OSError if the kernel returns less than Linux 5.0 does."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(raw) < SIZE:
        raise OSError("this kernel says too little about its connections (Linux 5.0 says enough)")
    again, segments, needless = (struct.unpack_from("=I", raw, at)[0] for at in (RETRANSMITTED, SEGMENTS, NEEDLESS))
    acked, rate = (struct.unpack_from("=Q", raw, at)[0] for at in (ACKED, DELIVERY_RATE))
    return Info(acked, segments, max(0, again - needless), None if raw[FLAGS] & SENDER_IDLE else float(rate))
