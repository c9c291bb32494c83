"""A real Slurm of several hosts on one machine, each host in its own namespaces.

It is the cluster of `hpc_mp_lab` with additions for tests: fake GPUs, a newer Slurm, an unprivileged user.
"""

import os
import pwd
import sys
import tempfile
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from hpc_mp_lab import lab

from .cluster import HERE, USER, Cluster, LabError, wait_until

__all__ = ["USER", "Cluster", "Lab", "LabError", "wait_until"]

# Lines for Slurm 24.11 with a key of its own instead of munge.
NEW = {"AuthType": "auth/slurm", "CredType": "cred/slurm", "AuthInfo": "cred_expire=5"}


class Lab(Cluster, lab.Lab):
    """A lab that lives while this object is entered (or from `up` to `down`).

    nodes: number of hosts, n1 … nN, with 4 CPUs and 4000 MB each. leaves: the nodes of each leaf switch (default: two halves).
    gpus: GPUs per node (copies of /dev/null, without compute). accounting: slurmdbd with account `acc`.
    overrides: lines of slurm.conf to add or replace. parent: the parent of the lab's directory, which all nodes see.
    keep: paths below /tmp that nodes also see, although every node has its own /tmp.
    chroot: a Debian system with Slurm >= 24.11 to run in (see chroot.py); then only `run` and `popen` reach that Slurm.
    patience: timeout in seconds for the nodes to become idle.
    """

    def __init__(self, nodes: int = 4, *, accounting: bool = False, gpus: int = 0, leaves: Sequence[Sequence[str]] | None = None,
                 overrides: Mapping[str, str] | None = None, parent: Path = Path("/var/tmp"), keep: Sequence[Path] = (),
                 chroot: Path | None = None, patience: float = 30.0) -> None:
        lab.Lab.__init__(
            self, Path(), leaves or lab.spread(nodes, min(nodes, 2)),  # `up` makes the directory
            node="CPUs=4 RealMemory=4000" + (f" Gres=gpu:{gpus}" if gpus else ""), accounting=accounting, users=("root", USER),
            overrides={**(NEW if chroot else {}), **(overrides or {})},
            keep=(*keep, HERE.parents[1], Path(sys.prefix), Path(sys.base_prefix)),
            release=(24, 11) if chroot else None, patience=patience)
        self.gpus, self.parent, self.chroot = gpus, parent, chroot

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def up(self, tell: Callable[[str], None] = lambda _: None) -> None:
        self.directory = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir=self.parent))
        self.directory.chmod(0o755)
        super().up(tell)

    def files(self) -> dict[str, str]:
        seen = dict.fromkeys((*self.keep, self.parent))
        users = (self.chroot or Path("/")) / "etc" / "passwd"
        return {
            **super().files(),
            # Slurm accepts only character devices as GPUs: they are copies of /dev/null.
            "gres.conf": f"Name=gpu File={self.directory}/gpu[0-{self.gpus - 1}]\n" if self.gpus else "",
            "passwd": passwd(users.read_text(), self.share / "home"),
            "system": "\t".join(map(str, (self.chroot, *seen))) + "\n" if self.chroot else "",
            "hidden": "".join("\t".join(map(str, (top, *paths))) + "\n" for top, paths in closed(seen).items()),
        }

    def write(self) -> None:
        super().write()
        (self.share / "home").mkdir(parents=True)
        self.share.chmod(0o1777)
        ordinary = pwd.getpwnam(USER)
        os.chown(self.share / "home", ordinary.pw_uid, ordinary.pw_gid)
        for gpu in range(self.gpus):
            os.mknod(self.directory / f"gpu{gpu}", 0o020666, os.stat("/dev/null").st_rdev)


def passwd(machine: str, home: Path) -> str:
    """Return /etc/passwd of the lab: the machine's, with a home and a shell for nobody, the ordinary user."""
    lines = [line for line in machine.splitlines() if not line.startswith("nobody:")]
    return "\n".join([*lines, f"nobody:x:65534:65534:nobody:{home}:/bin/bash"]) + "\n"


def closed(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """Return the directories (such as /root) that block an ordinary user's access, with the paths below them."""
    found: dict[Path, list[Path]] = {}
    for path in paths:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                found.setdefault(parent, []).append(path)
                break
    return found
