"""The reason why a lab cannot run here, for the reader of a skipped test."""

import os
import sys

from hpc_mp_lab.view import ACCOUNTING, PACKAGES, missing, refused

FAULTS = {"nft": "nftables"}  # what the faults of `faults.py` need too


def why_not(accounting: bool = False) -> str | None:
    """Return the reason as one sentence, or None if a lab can run."""
    if reason := unfit():
        return f"a Slurm lab cannot run here: {reason}"
    if packages := missing(PACKAGES | FAULTS | (ACCOUNTING if accounting else {})):
        return f"a Slurm lab needs these Debian packages: apt-get install {' '.join(packages)}"
    words = refused()
    return f"a Slurm lab needs namespaces, bridges and veth interfaces, which this machine refuses: {words}" if words else None


def unfit() -> str | None:
    """Return a reason that no installation can remove: not Linux or not root; None without one."""
    if sys.platform != "linux":
        return "it needs Linux namespaces, and this is not Linux"
    if os.geteuid() != 0:
        return "it needs root (it creates namespaces and network interfaces); you are not root"
    return None
