"""A Debian with a newer Slurm (24.11) in a directory, for `Lab(chroot=…)`: `python -m tests.slurm_lab.chroot [DIR]`."""

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
    # dependencies of the machine's Python, which is bound into the lab
    "python3-minimal", "libffi8", "libsqlite3-0", "libbz2-1.0", "libreadline8t64", "libgomp1", "liblzma5",
)  # fmt: skip

CLIENTS = ("sacct", "sacctmgr", "sbatch", "scancel", "scontrol", "sinfo", "squeue", "srun")


def built(directory: Path = CACHE, mirror: str = "http://deb.debian.org/debian") -> Path:
    """Return the directory, created by debootstrap if it does not exist (330 MB, a minute or more). A partial one is never left.

    Raises CalledProcessError, with debootstrap's output, if it cannot be created: not root, no network, no debootstrap.
    """
    if not directory.exists():
        with tempfile.TemporaryDirectory(prefix=directory.name, dir=directory.parent) as begun:
            include = f"--include={','.join(PACKAGES)}"
            command = ["debootstrap", "--variant=minbase", include, "trixie", f"{begun}/root", mirror]
            subprocess.run(command, check=True, stdout=sys.stderr)
            Path(begun, "root").rename(directory)
    return directory


def why_not_built(directory: Path = CACHE) -> str | None:
    """Return the reason why `built` cannot work here, or None."""
    if not directory.exists() and shutil.which("debootstrap") is None:
        return "the newer Slurm needs Debian's debootstrap: apt-get install debootstrap"
    if Path(sys.base_prefix) == Path("/usr"):
        return "the newer Slurm needs a Python outside /usr (from uv or pyenv): this one would hide the /usr that has that Slurm"
    return None


def clients(lab: Cluster, directory: Path) -> Path:
    """Write wrappers of the lab's programs into a directory for the PATH, for processes on this machine itself.

    They see only the lab's view of this machine: /tmp, `lab.share` and the paths that the lab keeps.
    """
    for program in CLIENTS:
        path = directory / program
        path.write_text(f'#!/bin/sh\nexec {shlex.join(lab._enter())} env --chdir="$PWD" /usr/bin/{program} "$@"\n')
        path.chmod(0o755)
    return directory


if __name__ == "__main__":
    print(built(Path(sys.argv[1]) if len(sys.argv) > 1 else CACHE))
