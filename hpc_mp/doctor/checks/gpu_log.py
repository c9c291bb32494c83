"""What the kernel's log says of NVIDIA's GPUs and NVSwitches."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import TypeVar

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.base.text import ago, counted
from hpc_mp.cluster.node.kernel_log import KernelMessage
from hpc_mp.cluster.node.xids import SXidLine, XidLine, sxid, xid
from hpc_mp.doctor.checks.check import Check
from hpc_mp.doctor.checks.gpu_pcie import read_log_with_gpus

RECENT_S = 7200.0  # azurehpc-health-checks looks two hours back; what is older was probably dealt with, by a reset or a reboot
REMEDIES = {
    "reset": "drain the node, reset the GPU (all GPUs together where they are joined by NVLink), run the doctor again",
    "reboot": "drain and power-cycle the node; have the GPU replaced if it happens again",
    "replace": "drain the node and have the GPU replaced",
    "watch": "no need to stop the node; look at gpu-row-remap and gpu-ecc-dram",
}
Entry = TypeVar("Entry", XidLine, SXidLine)


def xids(lines: Sequence[KernelMessage]) -> Iterator[Finding]:
    found = _by_part(lines, xid, lambda entry: (entry.bus, entry.number))
    grave = False
    for (bus, number), (entry, times, age) in found.items():
        if entry.action == "program":
            continue
        grave = True
        severity: Severity = "error" if entry.action != "watch" and age is not None and age <= RECENT_S else "warning"
        evidence = f"Xid {number}: {entry.meaning}; {_when(times, age)}"
        yield Finding("gpu-xid", severity, f"GPU {bus}", evidence, REMEDIES[entry.action])
    if lines and not grave:
        programs = sorted({number for _, number in found})
        also = f"; Xid {', '.join(map(str, programs))} are programs' doing" if programs else ""
        yield Finding("gpu-xid", "ok", "", f"no Xid that blames a GPU in {counted(len(lines), 'line')} of the kernel's log{also}")


def sxids(lines: Sequence[KernelMessage]) -> Iterator[Finding]:
    found = _by_part(lines, sxid, lambda entry: (f"{entry.switch} {entry.bus}", entry.number))
    for (switch, number), (entry, times, age) in found.items():
        fresh = entry.fatal and age is not None and age <= RECENT_S
        yield Finding("gpu-sxid", "error" if fresh else "warning", switch,
                      f"SXid {number} ({'fatal' if entry.fatal else 'not fatal'}): {entry.words}; {_when(times, age)}",
                      REMEDIES["reset"] if entry.fatal else "look at gpu-nvlink-errors; a link that goes on erring needs a reset")
    if lines and not found:
        yield Finding("gpu-sxid", "ok", "", "no error of an NVSwitch in the kernel's log")


def _by_part(lines: Sequence[KernelMessage], read: Callable[[str], Entry | None], key: Callable[[Entry], tuple[str, int]],
             ) -> dict[tuple[str, int], tuple[Entry, int, float | None]]:
    """The latest of each kind of each part, how often it was there, and how long ago the latest is."""
    found: dict[tuple[str, int], tuple[Entry, int, float | None]] = {}
    for line in lines:
        if (entry := read(line.text)) is not None:
            found[key(entry)] = (entry, found.get(key(entry), (entry, 0, None))[1] + 1, line.age)
    return found


def _when(times: int, age: float | None) -> str:
    when = "at a time that the log does not tell" if age is None else ago(age)
    return when if times == 1 else f"{times} times, last {when}"


CHECKS = (
    Check("gpu-xid", read_log_with_gpus, xids, "kernel log: NVRM: Xid", "error: one that blames the GPU within two hours",
          REMEDIES["reset"]),
    Check("gpu-sxid", read_log_with_gpus, sxids, "kernel log: SXid", "error: a fatal one within two hours", REMEDIES["reset"]),
)
