"""Line-based files: appended to despite a full disk, and followed while they grow."""

import os
from collections import deque
from collections.abc import Sequence
from pathlib import Path


class LineFile:
    """A file to which lines are appended and flushed one by one. While the disk is full, they wait in memory. ``path``: the file;
    created with its first line. ``limit``: maximum of waiting lines; beyond it the oldest are dropped and counted in
    ``dropped``."""

    def __init__(self, path: Path, limit: int = 10_000) -> None:
        self.path = path
        self.waiting: deque[bytes] = deque()
        self.dropped = 0
        self._limit = limit
        self._fd: int | None = None

    def write(self, line: str) -> None:
        """Append one line (given without its newline). Never raises for a full disk or an exceeded quota."""
        self.waiting.append(line.encode() + b"\n")
        while len(self.waiting) > self._limit:
            self.waiting.popleft()
            self.dropped += 1
        self.flush()

    def flush(self) -> bool:
        """Write the waiting lines. Return True if none is left."""
        try:
            if self._fd is None:
                self._fd = os.open(self.path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, 0o600)
            while self.waiting:
                self._append(self._fd, self.waiting[0])
                self.waiting.popleft()
        except OSError:
            return False
        return True

    def close(self) -> None:
        self.flush()
        if self._fd is not None:
            os.close(self._fd)
            self._fd = None

    @staticmethod
    def _append(fd: int, data: bytes) -> None:
        """Write all of ``data`` or nothing. A line cut off by a full disk is removed again, so that no reader sees half of it."""
        start = os.lseek(fd, 0, os.SEEK_END)
        written = 0
        try:
            while written < len(data):
                written += os.write(fd, data[written:])
        except OSError:
            os.ftruncate(fd, start)
            raise


def append_lines(path: Path, lines: Sequence[str]) -> None:
    """Append lines to a file as ``LineFile`` does."""
    file = LineFile(path, max(1, len(lines)))
    for line in lines:
        file.write(line)
    file.close()


class NewLines:
    """Reader of a growing file's complete lines, each returned once. A replaced file is read from its start."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._inode = 0
        self._offset = 0

    def read(self) -> list[str]:
        """Return the lines added since the last call; none while the file does not exist. Undecodable bytes are replaced."""
        try:
            with open(self._path, "rb") as file:
                inode = os.fstat(file.fileno()).st_ino
                if inode != self._inode:
                    self._inode, self._offset = inode, 0
                file.seek(self._offset)
                complete, newline, _ = file.read().rpartition(b"\n")
        except FileNotFoundError:
            return []
        self._offset += len(complete + newline)
        return complete.decode(errors="replace").splitlines()
