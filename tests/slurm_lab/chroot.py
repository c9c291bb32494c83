"""A Debian with a newer Slurm (24.11) in a directory, for `Lab(chroot=…)`: `python -m tests.slurm_lab.chroot [DIR]`."""

from __future__ import annotations

import shlex
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

from .cluster import Cluster

CACHE = Path("/var/tmp/debian-trixie-slurm")
PACKAGES = (
    "slurm-wlm", "slurmdbd", "munge", "iproute2", "iptables", "procps", "ca-certificates", "libpmix2t64",
    # what a Python of the machine, which is bound into the lab, may need
    "python3-minimal", "libffi8", "libsqlite3-0", "libbz2-1.0", "libreadline8t64", "libgomp1", "liblzma5",
)  # fmt: skip

CLIENTS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def built(directory: Path = CACHE, mirror: str = "http://deb.debian.org/debian") -> Path:
    """The directory, made by debootstrap if it is not there yet (330 MB, a minute or more); a half-made one is never left.

    CalledProcessError, with debootstrap's words, if it cannot be made: not root, no network, no debootstrap.
    """
    if not directory.exists():
        with tempfile.TemporaryDirectory(prefix=directory.name, dir=directory.parent) as begun:
            include = f"--include={','.join(PACKAGES)}"
            command = ["debootstrap", "--variant=minbase", include, "trixie", f"{begun}/root", mirror]
            subprocess.run(command, check=True, stdout=sys.stderr)
            Path(begun, "root").rename(directory)
    return directory


def why_not_built(directory: Path = CACHE) -> str | None:
    """Why `built` cannot work here, or None."""
    if not directory.exists() and shutil.which("debootstrap") is None:
        return "the newer Slurm needs Debian's debootstrap: apt-get install debootstrap"
    if Path(sys.base_prefix) == Path("/usr"):
        return "the newer Slurm needs a Python outside /usr (from uv or pyenv): this one would hide the /usr that has that Slurm"
    return None


def clients(lab: Cluster, directory: Path) -> Path:
    """Write programs that run those of the lab into a directory for the PATH, for what runs on this machine itself.

    They see only what the lab sees of this machine: /tmp, `lab.share` and what it keeps.
    """
    for program in CLIENTS:
        path = directory / program
        path.write_text(f'#!/bin/sh\nexec {shlex.join(lab._enter())} env --chdir="$PWD" /usr/bin/{program} "$@"\n')
        path.chmod(0o755)
    return directory


if __name__ == "__main__":
    print(built(Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE))
