"""What machines are made of: a Debian or Ubuntu in a directory, and the wheels that pip finds on them."""

from __future__ import annotations

import shutil
import subprocess
import sys
import tempfile
from dataclasses import dataclass
from pathlib import Path

PACKAGES = ("slurm-wlm", "slurmdbd", "mariadb-server-core", "mariadb-client-core", "munge", "iproute2", "procps",
            "ca-certificates", "python3-venv", "jq")  # fmt: skip
"""Slurm and munge stand for what cyclecloud-slurm's own specs install before those of hpc-mp."""


@dataclass(frozen=True)
class System:
    """A release as debootstrap knows it; `python`: its own."""

    release: str
    mirror: str
    python: str

    @property
    def directory(self) -> Path:
        return Path(f"/var/tmp/{self.release}-cyclecloud")

    def built(self) -> Path:
        """Made by debootstrap if it is not there yet (a minute and 500 MB); a half-made one is never left. CalledProcessError."""
        if not self.directory.exists():
            with tempfile.TemporaryDirectory(prefix=self.release, dir=self.directory.parent) as begun:
                command = ["debootstrap", "--variant=minbase", f"--include={','.join(PACKAGES)}", self.release, f"{begun}/root"]
                subprocess.run([*command, self.mirror], check=True, stdout=sys.stderr)
                Path(begun, "root").rename(self.directory)
        return self.directory


BOOKWORM = System("bookworm", "http://deb.debian.org/debian", "3.11")


def why_not(system: System) -> str | None:
    """Why no such system can be made here; None where it is there or can be tried."""
    if not system.directory.exists() and shutil.which("debootstrap") is None:
        return "machines of a CycleCloud cluster need Debian's debootstrap: apt-get install debootstrap"
    return None


def wheels(root: Path, system: System, directory: Path) -> Path:
    """A folder with a wheel of the checkout `root` and those it needs, torch of the Makefile's release. CalledProcessError."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, root], check=True,
                   stdout=sys.stderr)
    (own,) = directory.glob("hpc_mp-*.whl")
    subprocess.run([*pip, "download", "--quiet", "--dest", directory, f"--python-version={system.python}", "--only-binary=:all:",
                    TORCH, own], check=True, stdout=sys.stderr)
    return own


TORCH = "torch==2.13.0"
