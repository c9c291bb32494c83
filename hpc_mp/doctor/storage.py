"""File system benchmark: an active test, bounded in bytes and seconds, that leaves no files behind."""

import functools
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.base.findings import Finding
from hpc_mp.base.text import data_rate, data_size
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.mounts import SHARED, type_at
from hpc_mp.cluster.node.source import NodeSource, Unavailable

_BLOCK = 4 << 20
_SYNC = 64 << 20  # bytes between calls of fsync, which keep the test within its time
_SLOW = 0.1  # GB/s: below the slowest disks that clouds rent out
_SLOW_FILES = 100.0  # files created and removed per second


@dataclass(frozen=True)
class Rates:
    """Measured rates: ``write`` (including fsync) and ``read`` in GB/s of 10⁹ bytes, ``files`` created and removed per second.
    ``same``: True if the data read equals the data written."""

    write: float
    read: float
    files: float
    same: bool
    size: int


def measure(directory: str, size_limit: int = 256 << 20, seconds: float = 1.0) -> Rates:
    """Write at most ``size_limit`` bytes in about ``seconds``, read them back, then create and remove small files. The file is
    unlinked once it is open, so nothing is left if this process is killed. Raises OSError."""
    name = os.path.join(directory, f".hpc-mp-{os.getpid()}-{time.time_ns():x}")
    block = os.urandom(_BLOCK)
    file = os.open(name, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)
    try:
        os.unlink(name)
        begin = time.monotonic()
        written = 0
        while written < size_limit and time.monotonic() - begin < seconds:
            written += os.write(file, _numbered(block, written))
            if written % _SYNC == 0:
                os.fsync(file)
        os.fsync(file)
        write_s = time.monotonic() - begin
        os.posix_fadvise(file, 0, 0, os.POSIX_FADV_DONTNEED)  # else reads would come from the page cache
        begin, same, position = time.monotonic(), True, 0
        while position < written and time.monotonic() - begin < seconds:
            data = os.pread(file, min(_BLOCK, written - position), position)
            if not data:
                break
            same = same and (len(data) < _BLOCK or data == _numbered(block, position))
            position += len(data)
        read_s = time.monotonic() - begin
    finally:
        os.close(file)
    return Rates(written / write_s / 1e9, position / read_s / 1e9, _files(name, seconds / 2), same and position > 0, written)


def judge(where: str, type_: str, rates: Rates | Unavailable) -> Finding:
    """Return one finding: ``storage-shared`` or ``storage-local``, by the type of the file system (empty: unknown)."""
    code = "storage-shared" if type_ in SHARED else "storage-local"
    kind = f"{type_}, " if type_ else ""
    if isinstance(rates, Unavailable):
        return Finding(code, "unknown", where, f"{kind}{rates}")
    text = (f"{kind}{data_rate(rates.write)} written, {data_rate(rates.read)} read, {rates.files:.0f} files/s made and removed "
            f"({data_size(rates.size)})")
    if not rates.same:
        return Finding(code, "error", where, f"{text}; what was read is not what was written",
                       "do not trust this file system: look at its servers, disks and network")
    slow = rates.write < _SLOW or rates.read < _SLOW or rates.files < _SLOW_FILES
    cure = "compare with other nodes: if only this one is slow it is its disk or network, else the server"
    return Finding(code, "warning", where, text, cure) if slow else Finding(code, "ok", where, text)


def storage(directories: Sequence[str], source: NodeSource, deadline: float = 6.0) -> list[Finding]:
    """Test each directory in a separate process. One that hangs is unknown after ``deadline`` seconds."""
    rates = in_time({where: functools.partial(_measured, where) for where in directories}, deadline)
    return [judge(where, type_at(source, where), rates[where]) for where in directories]


def _measured(where: str) -> Rates:
    try:
        return measure(where)
    except OSError as error:
        raise Unavailable(f"{error.strerror or error}") from None


def _numbered(block: bytes, at: int) -> bytes:
    """Return the block with its file offset as its first 8 bytes, so that no two blocks are equal."""
    return at.to_bytes(8, "little") + block[8:]


def _files(name: str, seconds: float) -> float:
    begin, count = time.monotonic(), 0
    while time.monotonic() - begin < seconds:
        path = f"{name}-{count}"
        os.close(os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600))
        os.unlink(path)
        count += 1
    return count / (time.monotonic() - begin)
