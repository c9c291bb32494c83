"""A real Slurm of several hosts on one machine, each host in namespaces of its own.

A lab is one process tree below one PID 1 (`init.sh`) in namespaces of its own: when that process ends, the kernel ends every
process, interface and mount of the lab, and when the process that made the lab ends, however it ends, so does `init.sh`.
"""

from __future__ import annotations

import os
import platform
import pwd
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterable, Mapping, Sequence
from contextlib import ExitStack, suppress
from pathlib import Path
from types import TracebackType
from typing import Self

from . import conf
from .cluster import HERE, NAMESPACES, USER, Cluster, LabError, wait_until

__all__ = ["USER", "Cluster", "Lab", "LabError", "wait_until"]


class Lab(Cluster):
    """A lab that lives while this object is entered (or from `up` to `down`).

    nodes: how many hosts, n1 … nN, 4 CPUs and 4000 MB each. leaves: the nodes of each leaf switch (default: two halves).
    gpus: GPUs per node (copies of /dev/null, which nothing can compute on). accounting: slurmdbd with account `acc`.
    overrides: lines of slurm.conf to add or replace. parent: where the lab's directory, which all nodes see, is made.
    keep: paths below /tmp that nodes see too, for every node has a /tmp of its own.
    chroot: a Debian system with Slurm >= 24.11 to live in (see chroot.py); then only `run` and `popen` reach that Slurm.
    patience: seconds for the nodes to become idle.
    """

    def __init__(
        self,
        nodes: int = 4,
        *,
        accounting: bool = False,
        gpus: int = 0,
        leaves: Sequence[Sequence[str]] | None = None,
        overrides: Mapping[str, str] | None = None,
        parent: Path = Path("/var/tmp"),
        keep: Sequence[Path] = (),
        chroot: Path | None = None,
        patience: float = 30.0,
    ) -> None:
        self.nodes = tuple(f"n{i}" for i in range(1, nodes + 1))
        self.leaves = leaves or [leaf for leaf in (self.nodes[: (nodes + 1) // 2], self.nodes[(nodes + 1) // 2 :]) if leaf]
        self.accounting = accounting
        self.gpus = gpus
        self.overrides = overrides or {}
        self.parent = parent
        self.chroot = chroot
        self.patience = patience
        self.keep = (*keep, HERE.parents[1], Path(sys.prefix), Path(sys.base_prefix))
        self.endings = ExitStack()

    def __enter__(self) -> Self:
        self.up()
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.down()

    def up(self) -> None:
        """Start everything and wait until all nodes are idle. LabError with the daemons' words if that fails."""
        with ExitStack() as endings:
            self.directory = Path(tempfile.mkdtemp(prefix="slurm-lab-", dir=self.parent))
            self.directory.chmod(0o755)
            self.share = self.directory / "share"
            unshare = ["unshare", *NAMESPACES, "--pid", "--fork", "--kill-child"]
            process = subprocess.Popen(
                [*unshare, *self._command(None)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True
            )
            endings.callback(process.communicate)  # closes its standard input, and reads to its end
            wait_until(lambda: self._find(None) is not None, "the lab's first process")
            self.number = self._claim()
            endings.callback(self._release)
            endings.callback(self._evict, os.readlink(f"/proc/{process.pid}/ns/net"), process.pid)
            self._write()
            try:
                assert process.stdin and process.stdout
                process.stdin.write(b"\n")
                process.stdin.flush()
                if process.stdout.readline() != b"ready\n":
                    raise LabError("the lab did not start")
                for node in self.nodes:
                    self.boot(node)
                self.wait_idle(self.patience)
            except BaseException as error:
                error.add_note(self.logs())
                raise
            self.endings = endings.pop_all()

    def down(self) -> None:
        """End everything; nothing is left: no process, interface, mount, directory."""
        self.endings.close()

    def _claim(self) -> int:
        """The lab's number: the first for which this machine's end of the cable could be made, which only one lab can."""
        init = self._init_of(None)
        for number in range(32):
            name = self._interface(number)
            cable = ["ip", "link", "add", name, "type", "veth", "peer", "name", "uplink", "netns", str(init)]
            if subprocess.run(cable, capture_output=True).returncode == 0:
                subprocess.run(["ip", "addr", "add", f"{conf.address(number, conf.HOST)}/24", "dev", name], check=True)
                subprocess.run(["ip", "link", "set", name, "up"], check=True)
                return number
        raise LabError("32 labs are running, or interfaces cannot be made")

    def _release(self) -> None:
        """Take this machine's end of the cable away (the kernel would do so a little later)."""
        subprocess.run(["ip", "link", "del", self._interface(self.number)], capture_output=True)

    def _evict(self, network: str, spared: int) -> None:
        """End what `popen` started and nobody ended: whoever of this machine's processes is in the lab's network, but one."""
        here = os.readlink("/proc/self/ns/pid")
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                space = [os.readlink(process / "ns" / kind) for kind in ("net", "pid")]
                if space == [network, here] and int(process.name) != spared:
                    os.kill(int(process.name), signal.SIGKILL)

    @staticmethod
    def _interface(number: int) -> str:
        return f"slurmlab{number}"

    def _write(self) -> None:
        at = self.directory
        for name in ("etc", "munge", "log", "state", "spool", "share", "share/home", *(f"spool/{n}" for n in self.nodes)):
            (at / name).mkdir()
        (at / "share").chmod(0o1777)
        ordinary = pwd.getpwnam(USER)
        os.chown(at / "share" / "home", ordinary.pw_uid, ordinary.pw_gid)
        for gpu in range(self.gpus):
            os.mknod(at / f"gpu{gpu}", 0o020666, os.stat("/dev/null").st_rdev)
        seen = dict.fromkeys((*self.keep, self.parent))
        version = conf.NEW if self.chroot else conf.old(at)
        users = (self.chroot or Path("/")) / "etc" / "passwd"
        etc = {
            "name": f"lab{self.number}\n",
            "nodes": " ".join(self.nodes) + "\n",
            "slurm.conf": conf.slurm_conf(at, self.number, self.nodes, self.gpus, self.accounting, version, self.overrides),
            "slurmdbd.conf": conf.slurmdbd_conf(at, self.number) if self.accounting else "",
            "cgroup.conf": conf.NEW_CGROUP if self.chroot else conf.OLD_CGROUP,
            "gres.conf": conf.gres_conf(at, self.gpus),
            "topology.conf": conf.topology_conf(self.leaves),
            "hosts": conf.hosts(self.number, self.nodes, platform.node()),
            "passwd": conf.passwd(users.read_text(), self.share / "home"),
            "network": conf.network(self.number, self.leaves),
            "system": "\t".join(map(str, (self.chroot, *seen))) + "\n" if self.chroot else "",
            "kept": "\t".join(str(path) for path in (*self.keep, at) if path.is_relative_to("/tmp")) + "\n",
            "hidden": "".join("\t".join(map(str, (top, *paths))) + "\n" for top, paths in closed(seen).items()),
        }
        for name, text in etc.items():
            (at / "etc" / name).write_text(text)
        for secret in (at / "munge" / "key", at / "etc" / "slurm.key"):
            secret.write_bytes(os.urandom(1024))
        for closed_file in (at / "munge" / "key", at / "etc" / "slurm.key", at / "etc" / "slurmdbd.conf"):
            closed_file.chmod(0o600)


def closed(paths: Iterable[Path]) -> dict[Path, list[Path]]:
    """The directories (such as /root) that keep an ordinary user from the paths below them."""
    found: dict[Path, list[Path]] = {}
    for path in paths:
        for parent in reversed(path.parents):
            if not parent.stat().st_mode & 0o001:
                found.setdefault(parent, []).append(path)
                break
    return found
