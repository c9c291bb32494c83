"""What the kernel complained about in the last day, GPUs left out; and what it never forgets until it is booted again."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.base.text import ago
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log, read_taint
from hpc_mp.doctor.checks.check import Check

_DAY_S = 86_400.0


def _complaint(code: str, pattern: str, grave: Severity) -> Callable[[tuple[KernelMessage, ...]], Iterator[Finding]]:
    """A judge that looks for lines of the last day."""
    wanted = re.compile(pattern)

    def judge(lines: tuple[KernelMessage, ...]) -> Iterator[Finding]:
        found = [line for line in lines if (line.age is None or line.age <= _DAY_S) and wanted.search(line.text)]
        if found:
            last = found[-1]
            when = "" if last.age is None else f" {ago(last.age)}"
            yield Finding(code, grave, "", f"{len(found)} lines in the last day, the last{when}: {last.text.strip()[:160]}")
        else:
            yield Finding(code, "ok", "", "no such line in the last day")
    return judge


_HARDWARE = (r"\[Hardware Error\].*(severity: (fatal|recoverable)|[Uu]ncorrected|Machine Check: \d+ Bank)|EDAC .* UE "
             r"|Memory failure: 0x")  # corrected ones are counted by memory-errors
_LOCKUP = r"soft lockup|hard LOCKUP|rcu.*detected stalls|blocked for more than \d+ seconds|not responding, still trying"
_DISK = (r"I/O error, dev (sd|vd|xvd|nvme|md|dm)|nvme.*(timeout, |controller is down|Device not ready)|EXT4-fs error"
         r"|XFS.*(Corruption|Shutting down)|Remounting filesystem read-only")
_MEMORY = r"Out of memory: Killed process|oom-kill:constraint=CONSTRAINT_NONE"
_NETWORK = (r"NETDEV WATCHDOG|mlx5_core.*(health compromised|device's health|poll_health|cmd .*timeout)"
            r"|neighbour: .*table overflow|nf_conntrack: table full|efa .*(reset|timeout)")

_SCARS = {4: "a machine check (M)", 5: "a bad page of memory (B)", 7: "an oops (D)"}  # bits: Linux, admin-guide/tainted-kernels


def scars(taint: int) -> Iterator[Finding]:
    """Modules of NVIDIA and Mellanox mark a kernel too (P, O, E): that is well."""
    seen = [what for bit, what in _SCARS.items() if taint >> bit & 1]
    yield Finding("kernel-taint", "warning" if seen else "ok", "", f"kernel.tainted = {taint}"
                  + (f": {', '.join(seen)} since boot" if seen else ""))


CHECKS: tuple[Check[tuple[KernelMessage, ...]] | Check[int], ...] = (
    Check("kernel-hardware", read_kernel_log, _complaint("kernel-hardware", _HARDWARE, "error"),
          "the kernel's log: machine checks, EDAC, `[Hardware Error]`",
          "error: one that could not be corrected, in the last day",
          "read the whole message (ras-mc-ctl --errors); drain the node if memory or a processor is named"),
    Check("kernel-lockup", read_kernel_log, _complaint("kernel-lockup", _LOCKUP, "warning"),
          "the kernel's log: soft lockup, stalls, `blocked for more than`, a file server that is silent",
          "warning: in the last day",
          "look what the named process waited for: mostly a file server, a disk or a driver"),
    Check("kernel-disk", read_kernel_log, _complaint("kernel-disk", _DISK, "error"),
          "the kernel's log: I/O error, NVMe timeout, file system errors",
          "error: in the last day",
          "save what is on the disk and replace it"),
    Check("kernel-oom", read_kernel_log, _complaint("kernel-oom", _MEMORY, "warning"),
          "the kernel's log: Out of memory, for the whole machine and not a job's group",
          "warning: in the last day",
          "jobs may use more than there is: ConstrainRAMSpace=yes in cgroup.conf, RealMemory below what there is"),
    Check("kernel-network", read_kernel_log, _complaint("kernel-network", _NETWORK, "error"),
          "the kernel's log: adapter's health, transmit timeout, neighbour or connection table full",
          "error: in the last day",
          "an adapter's firmware that stops needs a reset or a new adapter; for full tables see kernel-neighbours"),
    Check("kernel-taint", read_taint, scars,
          "`/proc/sys/kernel/tainted`",
          "warning: since boot a machine check, a bad page of memory or an oops, even if the log has lost it",
          "drain the node, read the old log (journalctl -k -b), then reboot: after an oops, locks may be held for ever"),
)
