"""JSON messages, one per line, in both directions over a Unix socket; a message may carry open files."""

import json
import socket
from collections.abc import Mapping, Sequence
from typing import Any

CHUNK = 1 << 16
FILES = 8  # maximum of open files in one message


class EventChannel:
    """One end of the socket. Received files are collected in ``files``, in the order of sending."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end
        self._rest = b""
        self.files: list[int] = []

    def fileno(self) -> int:
        return self._end.fileno()

    def send(self, message: Mapping[str, Any], files: Sequence[int] = ()) -> None:
        """Send a message. Raises OSError (BrokenPipeError, ConnectionResetError) if the other side is gone."""
        data = json.dumps(message).encode() + b"\n"
        sent = socket.send_fds(self._end, [data], files) if files else 0
        self._end.sendall(data[sent:])

    def receive(self) -> list[dict[str, Any]]:
        """Wait for data and return the messages that are complete by now. Raises EOFError if the other side is gone."""
        try:
            data, files, _, _ = socket.recv_fds(self._end, CHUNK, FILES)
        except ConnectionError:
            data, files = b"", []
        if not data:
            raise EOFError
        self.files += files
        *lines, self._rest = (self._rest + data).split(b"\n")
        return [json.loads(line) for line in lines]

    def close(self) -> None:
        self._end.close()
