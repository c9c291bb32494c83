"""What machines are made of: a Debian or Ubuntu in a directory, and the wheels that pip finds on them."""

import shlex
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
    """A release as debootstrap knows it; `python`: its own; `keyring`: what its archive is signed with."""

    release: str
    mirror: str
    python: str
    keyring: str
    script: str  # of debootstrap, whose Debian release may be older than this one
    components: str = "main"

    @property
    def directory(self) -> Path:
        return Path(f"/var/tmp/{self.release}-cyclecloud")

    def command(self, target: Path, *options: str) -> list[str]:
        """debootstrap's, to make it in the target."""
        packages = f"--include={','.join(PACKAGES)}"
        return ["debootstrap", "--variant=minbase", f"--components={self.components}", packages, *options, self.release,
                str(target), self.mirror, self.script]

    def built(self) -> Path:
        """Made by debootstrap if it is not there yet (a minute and 500 MB); a half-made one is never left. CalledProcessError."""
        if not self.directory.exists():
            with tempfile.TemporaryDirectory(prefix=self.release, dir=self.directory.parent) as begun:
                root = Path(begun, "root")
                subprocess.run(self.command(root, f"--keyring={self.keyring}"), check=True, stdout=sys.stderr)
                root.rename(self.directory)
        return self.directory


BOOKWORM = System("bookworm", "http://deb.debian.org/debian", "3.11", "/usr/share/keyrings/debian-archive-keyring.gpg", "sid")
NOBLE = System("noble", "http://archive.ubuntu.com/ubuntu", "3.12", "/usr/share/keyrings/ubuntu-archive-keyring.gpg", "gutsy",
               "main,universe")
"""Slurm 22.05 and 23.11."""


def why_not(system: System) -> str | None:
    """Why no such system can be made here; None where it is there or can be tried."""
    if (system.directory / "debootstrap").exists():
        return f"debootstrap has not finished {system.directory}: remove it"
    if system.directory.exists():
        return None
    if shutil.which("debootstrap") is None:
        return "machines of a CycleCloud cluster need Debian's debootstrap: apt-get install debootstrap"
    if not Path(system.keyring).exists():
        by_hand = shlex.join(system.command(system.directory, "--no-check-gpg"))
        return f"{system.release} needs {system.keyring}, or, without a look at its signatures, by hand: {by_hand}"
    return None


def wheels(root: Path, system: System, directory: Path) -> Path:
    """A folder with a wheel of the checkout `root` and those it needs, torch of the Makefile's release. CalledProcessError."""
    pip = [sys.executable, "-m", "pip"]
    subprocess.run([sys.executable, "-m", "build", "--wheel", "--no-isolation", "--outdir", directory, root], check=True,
                   stdout=sys.stderr)
    (own,) = directory.glob("hpc_mp-*.whl")
    subprocess.run([*pip, "download", "--quiet", "--dest", directory, f"--python-version={system.python}", "--only-binary=:all:",
                    TORCH, f"{own}[train]"], check=True, stdout=sys.stderr)
    return own


TORCH = "torch==2.13.0"
