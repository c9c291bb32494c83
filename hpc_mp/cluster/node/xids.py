"""What the NVIDIA driver's Xid numbers (kernel log: ``NVRM: Xid (PCI:0000:c6:00): 79, …``) say about the node they come from.

The one table of them, for the launcher and for the node checks; as Python, because a node's own interpreter must be able to read
it. A number that is not listed counts as "program".

Sources: AWS' awsome-distributed-training (79: reboot; 48, 64, 95, 109, 110, 119, 120: reset; 74, 144 to 150: NVLink; 13, 31, 94:
watch); Azure's azurehpc-health-checks, which takes a node out of service for 62, 64, 69, 74, 79, 92 and others; NVIDIA's
health-validation (46, 48: drain, reset); NVIDIA's "Xid Errors" for the meanings, and for 121, 140 and 154.
"""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

# program: the program's doing, or an echo of another Xid; the node is not blamed. watch: it works on, but look at it soon.
# reset, reboot, replace: the GPU needs that.
Action = Literal["program", "watch", "reset", "reboot", "replace"]


@dataclass(frozen=True)
class Xid:
    """The meaning of one number."""

    meaning: str
    action: Action


@dataclass(frozen=True)
class XidLine:
    """One line of the kernel's log. ``bus`` is the GPU's PCI address without its function: ``0000:c6:00``."""

    bus: str
    number: int
    meaning: str
    action: Action


@dataclass(frozen=True)
class SXidLine:
    """The same of an NVSwitch; its driver says itself whether it is fatal."""

    switch: str
    bus: str
    number: int
    fatal: bool
    words: str


XIDS: dict[int, Xid] = {
    13: Xid("graphics engine exception, such as an index out of bounds", "program"),
    31: Xid("access to GPU memory that is not the program's", "program"),
    43: Xid("the GPU stopped a program that misbehaved", "program"),
    45: Xid("clean-up after another error, or a killed program", "program"),
    46: Xid("the GPU stopped processing", "reset"),
    48: Xid("double bit error of GPU memory", "reset"),
    62: Xid("the GPU's micro-controller halted", "reset"),
    63: Xid("a row of GPU memory is marked for remapping", "watch"),
    64: Xid("remapping a row of GPU memory failed", "replace"),
    69: Xid("graphics engine class error", "program"),
    74: Xid("NVLink error", "reset"),
    79: Xid("the GPU has fallen off the bus", "reboot"),
    92: Xid("many single bit errors of GPU memory", "watch"),
    94: Xid("memory error contained to one program", "watch"),
    95: Xid("memory error not contained", "reset"),
    109: Xid("context switch timeout", "reset"),
    110: Xid("security fault", "reset"),
    119: Xid("the GPU's system processor does not answer", "reset"),
    120: Xid("error of the GPU's system processor", "reset"),
    121: Xid("error of the link between GPU and CPU", "watch"),
    140: Xid("memory error that was not recovered", "reset"),
    144: Xid("NVLink error (SAW)", "reset"),
    145: Xid("NVLink error (RLW)", "reset"),
    146: Xid("NVLink error (TLW)", "reset"),
    147: Xid("NVLink error (TREX)", "reset"),
    148: Xid("NVLink error (NVLPW)", "reset"),
    149: Xid("NVLink error (NETIR)", "reset"),
    150: Xid("NVLink error (MSE)", "reset"),
}
_OTHER = Xid("not one that is known to take a node out of service", "program")
_XID = re.compile(r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F]{4,8}:[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?\): (\d+)")
_SXID = re.compile(r"nvidia-(nvswitch\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+),\s*(Fatal|Non-fatal),?\s*(.*)")
_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to \S+ \(([^)]*)\)")  # of Xid 154


def xid(line: str) -> XidLine | None:
    """What a line of the kernel's log says; None for a line that names no Xid."""
    found = _XID.search(line)
    if found is None:
        return None
    number = int(found[2])
    entry = XIDS.get(number, _OTHER)
    if number == 154 and (wanted := _RECOVERY.search(line)):
        entry = Xid(f"the driver now wants: {wanted[1]}", _wanted(wanted[1]))
    return XidLine(found[1].lower(), number, entry.meaning, entry.action)


def sxid(line: str) -> SXidLine | None:
    """The same for NVSwitches. Their "Severity …" lines repeat what the line before said."""
    found = _SXID.search(line)
    return found and SXidLine(found[1], found[2].lower(), int(found[3]), found[4] == "Fatal", found[5].strip())


def blamed(lines: Iterable[str]) -> list[XidLine]:
    """Those after which a GPU needs more than another program."""
    return [entry for line in lines if (entry := xid(line)) and entry.action not in ("program", "watch")]


def _wanted(words: str) -> Action:
    low = words.lower()
    if "reboot" in low:
        return "reboot"
    return "reset" if any(part in low for part in ("reset", "flr", "drain")) else "program"
