"""Error counters, and their growth since an earlier reading.

A lifetime count is meaningless: a cable that was changed a year ago still has its errors. So a reading is kept, and later
readings are compared with the oldest one of the last three hours. If none was kept yet, two readings a moment apart are compared.
"""

import contextlib
import json
import time
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from hpc_mp.cluster.node import netdev, rdma
from hpc_mp.cluster.node.gpu_links import link_counters
from hpc_mp.cluster.node.source import SHARED, NodeSource, Unavailable, keep, maybe, own, uptime

KEPT = "counters.json"
WINDOW_S = 3 * 3600.0
_APART_S = 600.0  # between two kept readings
_MOMENT_S = 1.0  # between two readings if none was kept
_STATISTICS = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_frame_errors", "rx_length_errors", "tx_carrier_errors",
               "rx_dropped", "tx_dropped", "rx_missed_errors", "rx_fifo_errors", "rx_packets", "tx_packets")
_ETHTOOL = ("pause", "discard", "out_of_buffer", "symbol_err", "crc_err", "allowance_exceeded", "no_buffer", "missed")
_FILES = {  # files that hold one number to the counter's name, of the parts of the path
    f"{rdma.CLASS}/*/ports/*/counters/*": "fabric/{4}/{6}/{8}",
    f"{rdma.CLASS}/*/ports/*/hw_counters/*": "fabric/{4}/{6}/{8}",
    "/sys/devices/system/edac/mc/mc[0-9]*/[cu]e_count": "memory/{6}/{7}",
    "/sys/devices/system/cpu/cpu[0-9]*/thermal_throttle/package_throttle_count": "heat/{5}",
}
_TCP = ("OutSegs", "RetransSegs")

Values = Mapping[str, int]


@dataclass(frozen=True)
class Changes:
    """The growth of counters."""

    seconds: float  # time between the two readings
    grown: Values  # growth of each counter, without counters that are new or were reset in between
    now: Values  # current value of each counter

    def of(self, beginning: str) -> dict[str, int]:
        """Return the growth of the counters whose names begin with ``beginning``, by the rest of their names."""
        return {name.removeprefix(beginning): grown for name, grown in self.grown.items() if name.startswith(beginning)}


def read_counters(source: NodeSource) -> dict[str, int]:
    """Return every visible counter: ``fabric/mlx5_0/1/symbol_error``, ``net/eth0/rx_dropped``, ``tcp/RetransSegs`` …"""
    counters: dict[str, int] = {}
    for kind in (_files, _interfaces, _tcp, _pci, link_counters):
        with contextlib.suppress(Unavailable):
            counters |= dict(kind(source))
    return counters


def read_changes(source: NodeSource) -> Changes:
    """Return the growth since an earlier reading. Raises Unavailable if the kernel shows no uptime."""
    earlier, at = _earlier(source), uptime(source)
    if earlier is None:
        earlier = at, read_counters(source)
        time.sleep(_MOMENT_S)
        at = uptime(source)
    first, before = earlier
    current = read_counters(source)
    grown = {name: value - before[name] for name, value in current.items() if value >= before.get(name, value + 1)}
    return Changes(max(at - first, 0.0), grown, current)


def keep_counters(source: NodeSource) -> None:
    """Add a reading to the kept ones, if the last one is old enough."""
    file = keep(source, KEPT)
    if file is None:
        return
    with contextlib.suppress(Unavailable, OSError):
        at, boot = uptime(source), source.text("/proc/sys/kernel/random/boot_id")
        readings = [reading for reading in _readings(source, str(file), boot) if reading["at"] > at - WINDOW_S]
        if not readings or at - readings[-1]["at"] >= _APART_S:
            new = file.with_suffix(".new")
            new.write_text(json.dumps({"boot": boot, "readings": [*readings, {"at": at, "values": read_counters(source)}]}))
            new.chmod(0o644)
            new.replace(file)


def _earlier(source: NodeSource) -> tuple[float, Values] | None:
    """Return time and values of the oldest reading of this boot inside the window: this user's, or else root's."""
    boot, at = maybe(source.text, "/proc/sys/kernel/random/boot_id"), uptime(source)
    for folder in dict.fromkeys((own(), SHARED)):
        for reading in _readings(source, f"{folder}/{KEPT}", boot):
            if at - WINDOW_S <= reading["at"] < at:
                return float(reading["at"]), reading["values"]
    return None


def _readings(source: NodeSource, name: str, boot: str | None) -> list[dict[str, Any]]:
    try:
        document = json.loads(source.text(name))
        return list(document["readings"]) if document["boot"] == boot else []
    except (Unavailable, ValueError, KeyError, TypeError):
        return []


def _numbers(source: NodeSource, name: str, paths: Iterable[str]) -> Iterator[tuple[str, int]]:
    """Yield the numbers in files. ``name``: a format of the parts of the path."""
    for path in paths:
        value = maybe(source.number, path)
        if value is not None:
            yield name.format(*path.split("/")), value


def _files(source: NodeSource) -> Iterator[tuple[str, int]]:
    for pattern, name in _FILES.items():
        yield from _numbers(source, name, source.names(pattern))


def _interfaces(source: NodeSource) -> Iterator[tuple[str, int]]:
    for interface in netdev.read_interfaces(source):
        base, prefix = f"{netdev.CLASS}/{interface.name}", f"net/{interface.name}/"
        yield from _numbers(source, "net/{4}/{6}", (f"{base}/statistics/{name}" for name in _STATISTICS))
        yield from _numbers(source, "net/{4}/{5}", (f"{base}/carrier_changes", f"{base}/carrier_down_count"))
        with contextlib.suppress(Unavailable):
            for line in source.answer(("ethtool", "-S", interface.name)).splitlines():
                name, _, value = line.strip().partition(": ")
                if value.isdigit() and any(part in name for part in _ETHTOOL) and "[" not in name:
                    yield prefix + name, int(value)


def _tcp(source: NodeSource) -> Iterator[tuple[str, int]]:
    lines = (maybe(source.text, "/proc/net/snmp") or "").splitlines()
    for names, values in zip(lines[::2], lines[1::2], strict=False):
        if names.startswith("Tcp:"):
            yield from ((f"tcp/{name}", int(value))
                        for name, value in zip(names.split()[1:], values.split()[1:], strict=True) if name in _TCP)


def _pci(source: NodeSource) -> Iterator[tuple[str, int]]:
    for grade in ("correctable", "nonfatal", "fatal"):
        for path in source.names(f"/sys/bus/pci/devices/*/aer_dev_{grade}"):
            for line in (maybe(source.text, path) or "").splitlines():
                name, _, value = line.rpartition(" ")
                if name.startswith("TOTAL_ERR") and value.isdigit():
                    yield f"pci/{path.split('/')[5]}/{grade}", int(value)
