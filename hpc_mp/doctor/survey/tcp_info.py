"""Kernel statistics of one TCP connection: ``struct tcp_info`` of linux/tcp.h (fields are only ever added)."""

from __future__ import annotations

import socket
import struct
from dataclasses import dataclass

FLAGS, RETRANSMITTED, ACKED, SEGMENTS, DELIVERY_RATE = 7, 100, 120, 156, 160  # offsets, in bytes
BUSY, RECEIVER_LIMITED, NEEDLESS = 168, 176, 216
SENDER_IDLE = 1  # flag: the delivery rate was limited by a sender without data to send
SIZE = 220  # bytes that Linux 5.0 and newer return


@dataclass(frozen=True, slots=True)
class Info:
    """The state of a sending connection at one moment."""

    acked: int  # bytes that have arrived
    segments: int  # data segments sent, including retransmissions
    lost: int  # retransmitted segments, without those that the receiver reported as duplicates
    rate: float | None  # last delivery rate in bytes per second; None if the sender did not fill the path
    limited: float  # fraction of the busy time so far in which the receiver's window was full: it reads too slowly


def info(connection: socket.socket) -> Info:
    """Return the state of a connection. Raises OSError if the kernel returns less than Linux 5.0 does."""
    raw = connection.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, SIZE)
    if len(raw) < SIZE:
        raise OSError("this kernel says too little about its connections (Linux 5.0 says enough)")
    again, segments, needless = (struct.unpack_from("=I", raw, at)[0] for at in (RETRANSMITTED, SEGMENTS, NEEDLESS))
    acked, rate, busy, waited = (struct.unpack_from("=Q", raw, at)[0] for at in (ACKED, DELIVERY_RATE, BUSY, RECEIVER_LIMITED))
    filled = not raw[FLAGS] & SENDER_IDLE
    return Info(acked, segments, max(0, again - needless), float(rate) if filled else None, waited / busy if busy else 0.0)
