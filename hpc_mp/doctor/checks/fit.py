"""Which of the checks that only look decide whether a node gets a job."""

from __future__ import annotations

from hpc_mp.doctor.checks.registry import PASSIVE

JUDGED = ("gpu-", "fabric-", "efa-", "gdr-", "limit-memlock", "memory-errors", "pci-errors", "kernel-hardware")
"""What a training cannot do without, or what makes it crawl: hardware and the fast network. How the host is set up, its disks and
mounts are left to the site; and the control group of who asks is not that of the ranks."""
CODES = tuple(check.code for check in PASSIVE if check.code.startswith(JUDGED))
