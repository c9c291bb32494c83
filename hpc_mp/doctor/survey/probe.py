"""MTU probe: full-size UDP packets with the don't-fragment bit, which need no privilege."""

import socket
import struct
import threading
import time
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass

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
