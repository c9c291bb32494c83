"""Machines in namespaces of this one, each with a root of its own; they share /shared and /sched, as CycleCloud exports them.

All is one process tree below one PID 1 (`site.sh`): when that ends, the kernel ends every process, interface and mount.
"""

import os
import shutil
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from pathlib import Path
from types import TracebackType
from typing import Self

from slurm_lab.lab import LabError, wait_until
from slurm_lab.why_not import why_not as why_no_lab

HERE = Path(__file__).resolve().parent
NAMESPACES = ("--mount", "--uts", "--ipc", "--net", "--pid")
INSIDE = (*NAMESPACES, "--no-fork", "sh", "-c", '"$@"; exit $?', "sh")  # nsenter's own fork would stop with its child, for ever
SHARED = ("shared", "sched")
PLAIN = {"PATH": "/usr/local/sbin:/usr/local/bin:/usr/sbin:/usr/bin:/sbin:/bin", "HOME": "/root", "LC_ALL": "C.UTF-8"}


LAYERS = """
mount -t tmpfs tmpfs /mnt && cd /mnt && mkdir written work root &&
mount -t overlay overlay -o lowerdir=/,upperdir=/mnt/written,workdir=/mnt/work root
"""


def why_not() -> str | None:
    """Why machines cannot be made here; None where they can."""
    if reason := why_no_lab():
        return reason.replace("a Slurm lab", "a lab of CycleCloud's machines")
    probe = subprocess.run(["unshare", "--mount", "sh", "-c", LAYERS], capture_output=True, text=True)
    return f"a lab of CycleCloud's machines needs overlays, which this machine refuses: {probe.stderr.strip()}" \
        if probe.returncode else None


class Machine:
    """One of a site's, while it runs; `root`: its files, as this machine sees them."""

    def __init__(self, name: str, pid: int) -> None:
        self.name = name
        self.pid = pid
        self.root = Path(f"/proc/{pid}/root")

    def run(self, argv: Sequence[str], *, environ: Mapping[str, str] | None = None, timeout: float = 60,
            user: str | None = None) -> tuple[int, str]:
        """Exit code and both outputs together."""
        become = ("runuser", f"--user={user}", "--") if user else ()
        command = ["nsenter", f"--target={self.pid}", *INSIDE, "env", "--chdir=/", *become, *argv]
        process = subprocess.Popen(command, env=PLAIN | dict(environ or {}), stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
                                   stderr=subprocess.STDOUT, text=True, start_new_session=True)
        try:
            said, _ = process.communicate(timeout=timeout)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, 9)
            said, _ = process.communicate()
            return 124, said
        return process.returncode, said

    def ask(self, *argv: str, timeout: float = 60, user: str | None = None) -> str:
        """What a program says. LabError if it fails."""
        code, said = self.run(argv, timeout=timeout, user=user)
        if code:
            raise LabError(f"{self.name}: {' '.join(argv)} ended with {code}:\n{said}")
        return said

    def write(self, path: str, text: str, mode: int = 0o644) -> None:
        file = self.root / path.lstrip("/")
        file.parent.mkdir(parents=True, exist_ok=True)
        file.write_text(text, encoding="utf-8")
        file.chmod(mode)


class Site:
    """`names`: the machines, which have the addresses 10.78.0.1, 2 …. `system`: what their roots are made of.

    keep: paths of this machine that all see. wheels: a folder that they see as /wheels.
    """

    def __init__(self, names: Sequence[str], system: Path, *, keep: Sequence[Path] = (), wheels: Path | None = None,
                 parent: Path = Path("/var/tmp")) -> None:
        self.names = tuple(names)
        self.system = system
        self.keep = tuple(keep)
        self.wheels = wheels
        self.parent = parent
        self.machines: dict[str, Machine] = {}

    def __enter__(self) -> Self:
        self.directory = Path(tempfile.mkdtemp(prefix="cyclecloud-lab-", dir=self.parent))
        self.directory.chmod(0o755)
        for folder in ("systems", "wheels", *SHARED):
            (self.directory / folder).mkdir()
        hosts = "".join(f"{self.address(name)} {name}\n" for name in self.names)
        (self.directory / "hosts").write_text(f"127.0.0.1 localhost\n{hosts}")
        for wheel in self.wheels.iterdir() if self.wheels else ():
            os.link(wheel, self.directory / "wheels" / wheel.name)
        command = ["unshare", *NAMESPACES, "--fork", "--kill-child", "bash", str(HERE / "site.sh"), str(self.directory)]
        self.process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, start_new_session=True)
        try:
            assert self.process.stdout
            if self.process.stdout.readline() != b"ready\n":
                raise LabError("the site's network could not be made")
            self.init = _innermost(self.process.pid)
            for name in self.names:
                self.boot(name)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.process.communicate()  # closes its standard input; when its PID 1 has ended, so has all else
        shutil.rmtree(self.directory)

    def __getitem__(self, name: str) -> Machine:
        return self.machines[name]

    def address(self, name: str) -> str:
        return f"10.78.0.{self.names.index(name) + 1}"

    def boot(self, name: str, without: Sequence[str] = ()) -> Machine:
        """Start a machine; `without`: of SHARED, what is not mounted."""
        for each in SHARED:
            sign = self.directory / f"unmounted-{each}"
            sign.touch() if each in without else sign.unlink(missing_ok=True)
        unshare = ["unshare", *NAMESPACES, "--fork", "--kill-child"]
        machine = ["bash", str(HERE / "machine.sh"), name, str(self.directory), str(self.system), *map(str, self.keep)]
        log = self.directory / f"{name}.log"
        with log.open("wb") as errors:
            started = subprocess.Popen(["nsenter", f"--target={self.init}", *INSIDE, *unshare, *machine],
                                       stdin=subprocess.DEVNULL, stdout=errors, stderr=errors, start_new_session=True)
        found = Machine(name, _innermost(started.pid))
        self._cable(found)
        wait_until(lambda: (found.root / "run/booted").exists() or started.poll() is not None, f"{name} is up")
        if started.poll() is not None:
            raise LabError(f"{name} did not start: {log.read_text()}")
        self.machines[name] = found
        return found

    def reimage(self, name: str, without: Sequence[str] = ()) -> Machine:
        """End a machine, and start it from the image: what it wrote on its own disk is gone, /shared and /sched stay."""
        os.kill(self[name].pid, 9)
        wait_until(lambda: not self[name].root.exists(), f"{name} is gone")
        shutil.rmtree(self.written(name).parent)
        return self.boot(name, without)

    def written(self, name: str) -> Path:
        """What a machine has written on its own disk since it was made from the image."""
        return Path(f"/proc/{self.init}/root") / str(self.directory / "systems" / name / "written")[1:]

    def _cable(self, machine: Machine) -> None:
        port = f"p{self.names.index(machine.name)}"
        inside, outside = (["nsenter", f"--target={pid}", "--net", "ip"] for pid in (machine.pid, self.init))
        subprocess.run([*outside, "link", "del", port], capture_output=True)  # of the machine before it was reimaged
        for command in ([*outside, "link", "add", port, "type", "veth", "peer", "name", "eth0", "netns", str(machine.pid)],
                        [*outside, "link", "set", port, "up", "master", "switch"],
                        [*inside, "link", "set", "lo", "up"], [*inside, "link", "set", "eth0", "up"],
                        [*inside, "addr", "add", f"{self.address(machine.name)}/24", "dev", "eth0"]):
            subprocess.run(command, check=True, capture_output=True)


def infiniband(machine: Machine) -> None:
    """A port in /sys/class of the machine, until `no_infiniband`."""
    port = "/run/class/infiniband/mlx5_ib0/ports/1"
    machine.ask("bash", "-c", "cp -a /sys/class /run/class 2>/dev/null; mount --bind /run/class /sys/class")
    for name, text in {"state": "1: DOWN", "phys_state": "3: Disabled", "link_layer": "InfiniBand",
                       "rate": "400 Gb/sec (4X NDR)"}.items():  # fmt: skip
        machine.write(f"{port}/{name}", f"{text}\n")


def no_infiniband(machine: Machine) -> None:
    machine.ask("umount", "/sys/class")


def _innermost(pid: int) -> int:
    """The process below this one that is PID 1 of a namespace of its own, in so many namespaces as it was asked to be."""
    found: list[int] = []

    def look() -> bool:
        current = pid
        while True:
            children = Path(f"/proc/{current}/task/{current}/children").read_text().split()
            command = Path(f"/proc/{current}/cmdline").read_bytes().split(b"\0")[0]
            if command == b"bash":
                found.append(current)
                return True
            if not children:
                return False
            current = int(children[0])

    wait_until(look, f"the first process below {pid}")
    return found[-1]
