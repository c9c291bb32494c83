"""Checks of the kernel log: of the last day, and for errors of NVIDIA GPUs and NVSwitches."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import ago, counted
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log, read_log_with_gpus
from hpc_mp.cluster.node.xids import NEEDS, Action, SXidLine, XidLine, sxid, xid
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well

_DAY_S = 86_400.0


def _complaint(**patterns: tuple[str, ...]) -> Callable[[tuple[KernelMessage, ...]], Iterator[Judgement]]:
    """Return a judge that searches the log of the last day. ``patterns``: regular expressions by ``error`` and ``warning``."""
    searches = [(grave, re.compile("|".join(patterns[grave]))) for grave in ("error", "warning") if grave in patterns]

    def judge(lines: tuple[KernelMessage, ...]) -> Iterator[Judgement]:
        recent = [line for line in lines if line.age is None or line.age <= _DAY_S]
        for grave, pattern in searches:
            if matches := [line for line in recent if pattern.search(line.text)]:
                last = matches[-1]
                when = "" if last.age is None else f" {ago(last.age)}"
                count = counted(len(matches), "line")
                yield Judgement(grave, f"{count} in the last day, the last{when}: {last.text.strip()[:160]}")
                return
        yield Judgement("ok", "no such line in the last day")
    return judge


# Messages of Linux 3.10 (RHEL 7) to 6.17, from the kernel's sources. Corrected errors are counted by memory-errors.
_HARDWARE = (
    r"\{\d+\}\[Hardware Error\].*severity: (fatal|recoverable|panic)", r"\[Hardware Error\].*([Uu]ncorrected(?!:)|Fatal error)",
    "mce: Uncorrected", "Processor context corrupt",
    r"Machine Check(?: Exception)?: *[0-9a-f]+ Bank (?!128:)\d+: [2367abef][0-9a-f]{15}",  # bit 61: not corrected; bank 128: heat
    r"MC\d+_STATUS\[[^|]*\|UE\|", r"EDAC .*\bUE ", r"Memory failure: 0x", r"not syncing: .*[Mm]achine check",
    r"NMI: (PCI system error|IOCK error|memory parity error)",
    r"SError Interrupt on CPU", r"[Ss]ynchronous (external abort|parity or ECC error)", r"EEH: Frozen P(E|HB)#",  # Arm, POWER
)
_FATAL_PCI = (r"Uncorrect(ed|able) \(Fatal\)", r"AER: device recovery failed", r"DPC: .*ERR_FATAL (detected|received)",
              r"\b(mlx5_core|bnxt_en|ice|nvme) \S+: .*(config space|device) inaccessible")
_NOT_FATAL = (r"Uncorrect(ed|able) \(Non-Fatal\)", r"\[Hardware Error\]: Deferred error",
              r"(?<!\})\[Hardware Error\].*severity: (fatal|recoverable|panic)",  # from BERT, which reports the previous boot
              r"DPC: .*(unmasked uncorrectable error|RP PIO error|ERR_NONFATAL) (detected|received)")
_LOCKUP = (
    "soft lockup", "hard LOCKUP", r"workqueue lockup", r"rcu.*(detected .*stalls?\b|kthread starved)",
    r"blocked (in I/O wait )?for more than \d+ seconds", "possible memory allocation deadlock",
    r"not responding, (still trying|timed out)", r"has not responded in \d+ seconds",
    r"ceph: (\[[^]]*\]: )?mds\d+ (hung|caps stale)", r"libceph: (mon|osd|mds)\d+ .*session lost",
    r"Lustre.*(Connection to .* was lost|evicted by|LBUG|has (timed out for s|failed due to net)|"
    r"operation (ost|mds|mgs)_connect to node \S+ failed)", r"LNet.*Timed out (tx|RDMA)",
    r"NFS: state manager: .*failed", r"nfs4_reclaim_(open_state|locks): (Lock reclaim failed|unhandled error)",
    r"NFS: nfs4_\w+:? unhandled error -(?!512\b)\d", r"GPFS Deadman Switch timer.*expired",
)
_DEVICE = r"dev(ice)? (sd|vd|xvd|nvme|md|dm|pmem|mmcblk)"
_DISK = (
    r"(I/O|critical (medium|nexus|space allocation)|recoverable transport|protection|timeout|device offline) error(,| on) "
    + _DEVICE, "lost async page write", r"rejecting I/O to (offline|dead) device", r"Device offlined - not ready after error",
    r"Sense Key ?: (Medium|Hardware) Error", r"ata\d+\S* (error: \{ UNC|failed command: )", r"[Uu]nrecovered [Rr]ead [Ee]rror",
    r"nvme.*(timeout, |controller is down|Device not ready|(reset|probe) failure|persistent internal error|no available path)",
    r"md/raid.*Disk failure on", r"megaraid_sas .*(is now (DEGRADED|OFFLINE)|FW in FAULT)", r"mpt3sas_cm\d+: fault_state",
    r"EXT[234]-fs (error|\(.*(I/O error|[Dd]ata (will be lost|loss)))", r"EXT4-fs warning.*I/O error",
    r"Remounting filesystem read-only", r"JBD2?: .*(IO errors|I/O error|Error -\d+)", "Aborting journal on",
    r"XFS.*([Cc]orruption|[Ss]hutting down|shut down|I/O [Ee]rror|[Ii]nternal error|force_shutdown|recovery failed)",
    r"XFS .*[Ff]ailing async write", r"writeback error on inode", r"BTRFS:? (error|critical|warning .*csum failed)",
    r"Pool .* uncorrectable I/O failure", r"zio pool=\S+ vdev=\S+ error=5 type=[12]",
)
_MEMORY = (r"Out of memory.*: Kill(ed)? process", r"not syncing: .*[Oo]ut of memory", r"oom-kill:constraint=CONSTRAINT_NONE")
_NETWORK = (
    r"NETDEV WATCHDOG.*timed out", r"TX timeout (detected|on queue)", r"Detected (Tx|Hardware) Unit Hang",
    r"mlx5_core.*(health compromised|device's health|poll_health|Fatal error \d+ detected|firmware internal error)",
    r"mlx5_core.*(cmd .*timeout|wait_func.*(timeout|No done completion)|timeout\. Will cause a leak)",
    r"mlx5_.*(module event\[error\]|Cable error|[Hh]igh temperature)", r"efa .*(reset|timeout)",
    r"mlx5_core.*(issue observed, .*severity\([0-3]\)|synd 0x[1-9a-f]\w*: |recovery flow aborted|handling bad device)",
    r"mlx5_core.*initializing state, aborting",
    r"bnxt_(en|re) .*(Error \(timeout: |[Tt]imed ?out|Firmware (not responding|fatal error))", r"mana .*HWC: Request timed out",
    r"ena .*watchdog timeout", r"ib\w+: transmit timeout", r"[Nn]eighbou?r.*table overflow", r"conntrack: table full",
    r"TCP: out of memory",
)
_LINKS = (  # of a bond; it goes on with the others, and the link may be back
    "link status definitely down", r"now running without any active interface", r"No 802\.3ad response from the link partner",
)


CHECKS = checks_of(read_kernel_log, {
    "kernel-hardware": _complaint(error=_HARDWARE + _FATAL_PCI, warning=_NOT_FATAL),
    "kernel-lockup": _complaint(warning=_LOCKUP),
    "kernel-disk": _complaint(error=_DISK),
    "kernel-oom": _complaint(warning=_MEMORY),
    "kernel-network": _complaint(error=_NETWORK, warning=_LINKS),
})


RECENT_S = 7200.0  # as azurehpc-health-checks; older errors were probably cured by a reset or a reboot
REMEDIES: dict[Action, str] = {
    "seat": "drain the node; see that the GPU sits firmly and that its power cables are attached",
    "reset": "drain the node, reset the GPU (all GPUs together where they are joined by NVLink), run the doctor again",
    "reboot": "drain and power-cycle the node; have the GPU replaced if it happens again",
    "replace": "drain the node and have the GPU replaced",
    "watch": "no need to stop the node; look at gpu-row-remap and gpu-ecc-dram",
    "support": "no need to stop the node; show nvidia-bug-report.sh to NVIDIA if it happens again",
    "unknown": "look it up in NVIDIA's Xid catalogue",
}
HARMLESS: dict[Action, str] = {"program": "are programs' doing", "none": "ask for nothing"}
_GOES_ON = re.compile(r"NVRM: (?:\(PCI ID: |fallen off the bus)")  # continuation of a message whose first line names the GPU
Entry = TypeVar("Entry", XidLine, SXidLine)


def xids(lines: Sequence[KernelMessage]) -> Iterator[Judgement]:
    entries = _by_part(_whole(lines), xid, lambda entry: (entry.bus, f"{entry.kind}{entry.echo}"))
    own = {(entry.bus, entry.number) for entry, *_ in entries.values() if not entry.echo}
    grave = False
    for entry, times, age in entries.values():
        if entry.action in HARMLESS or (entry.echo and (entry.bus, entry.number) in own):
            continue
        grave = True
        fresh = entry.action in NEEDS and age is not None and age <= RECENT_S
        severity: Severity = "error" if fresh else "unknown" if entry.action == "unknown" else "warning"
        yield Judgement(severity, f"{entry}; {_when(times, age)}", f"GPU {entry.bus}".strip(), REMEDIES[entry.action])
    if lines and not grave:
        also = ""
        for action, text in HARMLESS.items():
            numbers = sorted({entry.number or 0 for entry, *_ in entries.values() if entry.action == action})
            also += f"; Xid {', '.join(map(str, numbers))} {text}" if numbers else ""
        yield Judgement("ok", f"no Xid that blames a GPU in {counted(len(lines), 'line')} of the kernel's log{also}")


def _whole(lines: Sequence[KernelMessage]) -> list[KernelMessage]:
    """Return the messages with multi-line sentences joined."""
    messages: list[KernelMessage] = []
    for line in lines:
        if messages and _GOES_ON.search(line.text):
            messages[-1] = replace(messages[-1], text=f"{messages[-1].text} {line.text.strip()}")
        else:
            messages.append(line)
    return messages


def sxids(lines: Sequence[KernelMessage]) -> Iterator[Judgement]:
    entries = _by_part(lines, sxid, lambda entry: (f"{entry.switch} {entry.bus}", str(entry.number)))
    bad = (Judgement("error" if entry.fatal and age is not None and age <= RECENT_S else "warning",
                     f"SXid {number} ({'fatal' if entry.fatal else 'not fatal'}): {entry.words}; {_when(times, age)}", switch,
                     REMEDIES["reset"] if entry.fatal else "look at gpu-nvlink-errors; a link that goes on erring needs a reset")
           for (switch, number), (entry, times, age) in entries.items())
    yield from or_well(bad, "no error of an NVSwitch in the kernel's log" if lines else "")


def _by_part(lines: Sequence[KernelMessage], read: Callable[[str], Entry | None], key: Callable[[Entry], tuple[str, str]],
             ) -> dict[tuple[str, str], tuple[Entry, int, float | None]]:
    """Return, by part and kind, the latest entry, the number of occurrences, and the age of the latest."""
    entries: dict[tuple[str, str], tuple[Entry, int, float | None]] = {}
    for line in lines:
        if (entry := read(line.text)) is not None:
            entries[key(entry)] = (entry, entries.get(key(entry), (entry, 0, None))[1] + 1, line.age)
    return entries


def _when(times: int, age: float | None) -> str:
    when = "at a time that the log does not tell" if age is None else ago(age)
    return when if times == 1 else f"{times} times, last {when}"


XIDS = checks_of(read_log_with_gpus, {"gpu-xid": xids, "gpu-sxid": sxids})
