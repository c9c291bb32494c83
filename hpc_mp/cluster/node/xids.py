"""The NVIDIA driver's Xid numbers (kernel log: ``NVRM: Xid (PCI:0000:c6:00): 79, …``) and their meaning for the node.

This is the only table of them, for the launcher and for the node checks. It is Python because a node's own interpreter must be
able to read it.

Sources: NVIDIA's "Analyzing Xid Errors with the Xid Catalog", column "Immediate Action", and the archived catalogue for numbers
of GPUs before Ampere. This table is stricter in a few places. 63, 92, 94, 121 and 157 are worth a look, although the GPU
continues to work. After 64 the catalogue recommends a reset, and support if that does not help. 168 is as in AWS'
awsome-distributed-training.
"""

import re
from collections.abc import Iterable
from dataclasses import dataclass, replace
from typing import Literal

from hpc_mp.cluster.node.nvidia_smi import address

# none: no action. program: caused by the program, or an echo of another Xid; the program must be restarted. watch: the GPU
# continues to work, but needs a look soon. support: NVIDIA's only advice is to ask. unknown: the catalogue lacks the number.
# seat, reset, reboot, replace: the GPU needs that.
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
_ROWS: dict[Action, dict[tuple[int, ...], str]] = {
    "program": {
        (8,): "the GPU stopped processing for a program", (11, 25, 32): "invalid or corrupted stream of commands",
        (13,): "graphics engine exception, such as an index out of bounds", (37, 38): "firmware error that the driver survived",
        (31,): "access to GPU memory outside the program's", (43,): "the GPU stopped a program that misbehaved",
        (39, 40, 41, 70, 71, 72, 75, 76, 77, 85, *range(126, 136)): "copy engine exception", (69,): "graphics engine class error",
        (44,): "graphics engine fault during a context switch", (45,): "clean-up after another error, or a killed program",
        (60, 68, 82, 83, 84, 86, 88, 89, *range(96, 106), 139): "exception of an engine for video, pictures or optical flow",
        (66, 67): "illegal access by the driver", (80,): "corrupted data sent to the GPU", (141,): "CUDA fast path error",
        (108, 137): "access over NVLink to memory outside the program's"},
    "none": {
        (14, 106, 107): "test message", (93,): "limit of writes to the infoROM", (154,): "change of the recovery action",
        (152, 153): "error of the deep learning accelerator", (160, 161): "a channel was retired, or could not be",
        (162, 163): "power smoothing was switched on or off"},
    "watch": {
        (63,): "a row of GPU memory is marked for remapping", (92,): "many single bit errors of GPU memory",
        (94,): "memory error contained to one program", (121,): "corrected errors of the link between GPU and CPU",
        (157,): "a part of the GPU could not be retired for lack of spares",
        (164, 165): "the hardware for power smoothing is worn out, or nearly so",
        (171, 172): "detail of an uncorrectable memory error (Xid 48)"},
    "support": {
        (16, 19, 56): "display engine error", (26, 57, 58): "error or timeout of the interface to GPU memory",
        (59, 61, 169): "error of the GPU's micro-controller", (47, 65, 73, 142): "exception of a video encoder",
        (78,): "a virtual GPU does not start: host and guest need matching drivers", (167,): "fatal timeout on PCI Express",
        (166, 170): "error of encrypted NVLink traffic (confidential computing)"},
    "seat": {(54,): "auxiliary power is not connected to the GPU board"},
    "reset": {
        (46,): "the GPU stopped processing", (48,): "double bit error of GPU memory", (62,): "the GPU's micro-controller halted",
        (74,): "NVLink error", (95,): "memory error not contained", (109,): "context switch timeout", (110,): "security fault",
        (119,): "the GPU's system processor does not answer", (120,): "error of the GPU's system processor",
        (136,): "training of an NVLink failed", (140,): "memory error that was not recovered",
        (143,): "the GPU could not be initialised", (155,): "an NVLink was taken down by software",
        (156,): "a part of the GPU is to be retired", (158,): "fatal timeout of the GPU",
        (144,): "NVLink error (SAW)", (145,): "NVLink error (RLW)", (146,): "NVLink error (TLW)", (147,): "NVLink error (TREX)",
        (148,): "NVLink error (NVLPW)", (149,): "NVLink error (NETIR)", (150,): "NVLink error (MSE)",
        (159,): "error of the coherent link between GPU and CPU"},
    "reboot": {
        (79,): "the GPU has fallen off the bus", (151,): "renewal of an encryption key failed",
        (168,): "memory errors leave the GPU less memory"},
    "replace": {(64,): "remapping a row of GPU memory failed"},
}
_LAST = 172  # of the catalogue
_UNUSED, _OTHER = Xid("unused on current GPUs", "support"), Xid("not in NVIDIA's catalogue", "unknown")
XIDS: dict[int, Xid] = dict.fromkeys(range(1, _LAST + 1), _UNUSED) | {
    number: Xid(meaning, action) for action, rows in _ROWS.items() for numbers, meaning in rows.items() for number in numbers}

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
