"""The NVIDIA driver's Xid numbers in the kernel's log, and their meaning for the node: the table ``env/xids.toml``."""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpc_mp.base.packed import node_table
from hpc_mp.cluster.node.nvidia_smi import address

# What has to be done, as the table's head explains it; unknown: the table lacks the number.
Action = Literal["none", "program", "watch", "support", "unknown", "seat", "reset", "reboot", "replace"]
NEEDS: dict[Action, str] = {"seat": "check its power cables and its seat", "reset": "reset", "reboot": "reboot",
                            "replace": "replacement"}


@dataclass(frozen=True)
class Xid:
    """The meaning of one number."""

    meaning: str
    action: Action


@dataclass(frozen=True)
class XidLine:
    """One line of the kernel's log."""

    bus: str  # the GPU's PCI address without its function: ``0000:c6:00``; empty if the line has none
    number: int | None  # None for messages of the driver without an Xid
    meaning: str
    action: Action
    echo: bool = False  # True if the line is an Xid 45 that names an earlier Xid: number, meaning and action are that one's

    @property
    def kind(self) -> str:
        """A key, equal for lines of which only the last counts, such as those about the recovery action."""
        return "154" if self.number == 154 else f"{self.meaning} {self.action}"

    def __str__(self) -> str:
        named = ", named by Xid 45" if self.echo else ""
        return self.meaning if self.number is None else f"Xid {self.number}: {self.meaning}{named}"


@dataclass(frozen=True)
class SXidLine:
    """The NVSwitch's counterpart; its driver states whether it is fatal."""

    switch: str
    bus: str
    number: int
    fatal: bool
    words: str


_NVLINK5 = range(144, 151)
_TABLE: dict[Action, dict[str, list[int]]] = node_table("xids")  # type: ignore[assignment]
_LAST = 172  # of NVIDIA's catalogue
_UNUSED, _OTHER = Xid("unused on current GPUs", "support"), Xid("not in NVIDIA's catalogue", "unknown")
XIDS: dict[int, Xid] = dict.fromkeys(range(1, _LAST + 1), _UNUSED) | {
    number: Xid(meaning, action) for action, rows in _TABLE.items() for meaning, numbers in rows.items() for number in numbers}

_BUS = r"((?:[0-9a-fA-F]{4,8}:)?[0-9a-fA-F]{2}:[0-9a-fA-F]{2})(?:\.\d)?"
_XID = re.compile(rf"NVRM: Xid \((?:PCI:)?{_BUS}(?: GPU-I:[^)]*)?\): (\d+)(.*)")  # with the MIG instance, if it has one
_SXID = re.compile(r"nvidia-(nvswitch\d+): SXid \(PCI:([0-9a-fA-F:.]+)\): (\d+),\s*(Fatal|Non-fatal),?\s*(.*)")
_CAUSE = re.compile(r"caused by previous Xid (\d+)")  # of Xid 45
_NOT_FATAL = re.compile(r"\bNon-?fatal\b", re.IGNORECASE)  # severity of NVLink errors
_RECOVERY = re.compile(r"recovery action changed from \S+ \([^)]*\) to \S+ \(([^)]*)\)")  # of Xid 154
# Messages of the driver, and of the kernel about it, without a number.
_UNNUMBERED: tuple[tuple[re.Pattern[str], int | None, Xid], ...] = (
    (re.compile(rf"NVRM: (?:(?:The NVIDIA )?GPU (?:at )?(?:PCI:)?{_BUS}.*)?\bfallen off the bus"), 79, XIDS[79]),
    (re.compile(rf"NVRM: (?:GPU {_BUS}: )?(?:RmInitAdapter|rm_init_adapter)\b.*failed"), None,
     Xid("the driver could not initialise it (RmInitAdapter)", "reboot")),
    (re.compile(rf"nvidia {_BUS}: .*(?:config space|device) inaccessible"), None,
     Xid("it does not answer on the PCI bus", "reboot")),
    (re.compile(rf"NVRM: (?:GPU {_BUS}: )?.*\[NV_ERR_RESET_REQUIRED\]"), None, Xid("the driver requests a reset", "reset")),
    (re.compile(rf"NVRM: (?:GPU {_BUS}: )?.*\[NV_ERR_GPU_IS_LOST\]"), 79, XIDS[79]),
)


def xid(line: str) -> XidLine | None:
    """Return the GPU error in a line of the kernel's log; None for a line without one."""
    if (match := _XID.search(line)) is None:
        return next((XidLine(_address(message[1]), number, entry.meaning, entry.action)
                     for pattern, number, entry in _UNNUMBERED if (message := pattern.search(line))), None)
    number = int(match[2])
    entry = XIDS.get(number, _OTHER)
    if number == 154 and (recovery := _RECOVERY.search(line)):
        entry = Xid(f"the driver now requests: {recovery[1]}", _recovery_action(recovery[1]))
    elif number in _NVLINK5 and _NOT_FATAL.search(match[3]):
        entry = replace(entry, action="none")
    elif number == 45 and (cause := _CAUSE.search(match[3])) and int(cause[1]) in XIDS and int(cause[1]) != 45:
        return XidLine(_address(match[1]), int(cause[1]), XIDS[int(cause[1])].meaning, XIDS[int(cause[1])].action, True)
    return XidLine(_address(match[1]), number, entry.meaning, entry.action)


def sxid(line: str) -> SXidLine | None:
    """Return the NVSwitch error in a line; None for a line without one. "Severity …" lines repeat the previous line."""
    match = _SXID.search(line)
    return match and SXidLine(match[1], match[2].lower(), int(match[3]), match[4] == "Fatal", match[5].strip())


def blamed(lines: Iterable[str]) -> list[XidLine]:
    """Return the lines after which a GPU needs more than another program."""
    return [entry for line in lines if (entry := xid(line)) and entry.action in NEEDS]


def _address(bus: str | None) -> str:
    return address(bus if bus.count(":") > 1 else f"0:{bus}") if bus else ""


def _recovery_action(text: str) -> Action:
    low = text.lower()
    if "reboot" in low:
        return "reboot"
    return "reset" if any(part in low for part in ("reset", "flr", "drain")) else "none"
