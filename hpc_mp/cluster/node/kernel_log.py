"""The kernel's log, from any source that this user may read."""

import contextlib
import os
import re
from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_pci import read_gpus
from hpc_mp.cluster.node.source import NodeSource, Unavailable, maybe, uptime

_ANSWERS = (("dmesg",), ("journalctl", "-k", "-b", "--no-pager", "-o", "short-monotonic"))
_FILES = ("/var/log/kern.log", "/var/log/messages", "/var/log/syslog")
_MOST = 8 << 20  # bytes that are read at most from the end of a log
_RECORD = re.compile(r"\d+,\d+,(\d+),[^;]*;(.*)")  # /dev/kmsg: priority, number, microseconds since boot, flags; text
_STAMPED = re.compile(r"\[ *(\d+\.\d+)\] ?(?:\S+ kernel: )?(.*)")


@dataclass(frozen=True)
class KernelMessage:
    """One message. ``age`` is in seconds; None if the log states no comparable time."""

    age: float | None
    text: str


def read_kernel_log(source: NodeSource) -> tuple[KernelMessage, ...]:
    """Return all messages since boot, oldest first. Raises Unavailable with the tried sources if no log may be read."""
    up = maybe(uptime, source)
    failures = []
    try:
        return tuple(_records(_kmsg(source), up))
    except Unavailable as unseen:
        failures.append(str(unseen))
    for argv in _ANSWERS:
        try:
            if messages := tuple(_stamped(source.answer(argv), up)):
                return messages
            failures.append(f"{argv[0]}: shows this user no messages")
        except Unavailable as unseen:
            failures.append(f"{argv[0]}: {unseen}")
    for name in _FILES:
        with contextlib.suppress(Unavailable):
            return tuple(_stamped(source.text(name)[-_MOST:], up))
    raise Unavailable("; ".join(failures))


def read_log_with_gpus(source: NodeSource) -> tuple[KernelMessage, ...]:
    """Return the kernel log if this machine has NVIDIA GPUs, else nothing. Raises Unavailable."""
    return read_kernel_log(source) if any(gpu.vendor == "nvidia" for gpu in read_gpus(source)) else ()


def _kmsg(source: NodeSource) -> str:
    """Read the whole buffer. The device returns one record per read, and an error when the next read would block."""
    try:
        descriptor = os.open(source.path("/dev/kmsg"), os.O_RDONLY | os.O_NONBLOCK)
    except OSError as error:
        raise Unavailable(f"/dev/kmsg: {error.strerror}") from None
    parts, size = [], 0
    try:
        while size < _MOST:
            try:
                part = os.read(descriptor, 1 << 16)
            except BrokenPipeError:  # the oldest records were overwritten during the read; go on with the next
                continue
            except BlockingIOError:
                break
            if not part:
                break
            parts.append(part)
            size += len(part)
    except OSError as error:
        raise Unavailable(f"/dev/kmsg: {error.strerror}") from None
    finally:
        os.close(descriptor)
    return b"".join(parts).decode(errors="replace")


def _records(text: str, up: float | None) -> list[KernelMessage]:
    matches = (_RECORD.match(line) for line in text.splitlines())
    return [KernelMessage(None if up is None else up - int(record[1]) / 1e6, record[2]) for record in matches if record]


def _stamped(text: str, up: float | None) -> list[KernelMessage]:
    lines = []
    for line in text.splitlines():
        if line.startswith("-- "):  # journalctl's own lines: where the journal begins, or that it has no entries
            continue
        match = _STAMPED.match(line)
        age = up - float(match[1]) if match and up is not None else None
        lines.append(KernelMessage(age, match[2] if match else line))
    return lines
