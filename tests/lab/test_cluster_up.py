"""A cluster on a laptop, by its commands: up, used by anybody, broken, down; and nothing left, however it ends."""

import fcntl
import json
import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from rendering import executable
from slurm_lab.cluster import wait_until
from slurm_lab.why_not import why_not
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp_lab import keeper
from hpc_mp_lab.cluster import LabCluster, first_process
from hpc_mp_lab.command import SBIN, command
from hpc_mp_lab.lab import shared_out

reason = why_not()
needs_slurm = pytest.mark.skipif(reason is not None, reason=str(reason))
ME = f"test-{os.getpid()}"  # tests of other processes have clusters of their own
COMMAND = (sys.executable, "-m", "hpc_mp", "lab")


def cluster(*words: str, name: str | None = None, code: int = 0, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
    named = ["--name", name] if name else []
    done = subprocess.run([*COMMAND, words[0], *named, *words[1:]], cwd=cwd, capture_output=True, text=True, timeout=200)
    assert done.returncode == code, done.stdout + done.stderr
    return done


def act(*words: str, code: int = 0) -> str:
    """The same on the shared cluster and within this process, which is quicker; what it says."""
    done = CliRunner().invoke(command, [words[0], "--name", ME, *words[1:]])
    wrong = isinstance(done.exception, HpcMpError)
    assert (2 if wrong else done.exit_code) == code, done.output
    return str(done.exception) if wrong else done.output


@dataclass(frozen=True)
class Traces:
    """What a cluster that is up has on this machine; `left` says what of that is still there."""

    paths: frozenset[Path]
    namespaces: frozenset[str]  # the kernel may give their numbers to another lab as soon as they are free
    directory: str
    processes: frozenset[str]  # all of this machine: only one that ran while the cluster was up can be in its namespaces

    @classmethod
    def of(cls, directory: Path) -> "Traces":
        number = (directory / "etc" / "name").read_text().strip().removeprefix("lab")
        first = first_process(directory)
        own = {os.readlink(space) for space in Path(f"/proc/{first}/ns").iterdir()}
        own -= {os.readlink(space) for space in Path("/proc/self/ns").iterdir()}
        assert len(own) >= 5  # mounts, names, IPC, network, processes
        processes = frozenset(process.name for process in Path("/proc").glob("[0-9]*"))
        return cls(frozenset({directory, Path(f"/sys/class/net/slurmlab{number}")}), frozenset(own), str(directory), processes)

    def left(self) -> list[str]:
        found = [str(path) for path in self.paths if path.exists()]
        found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if self.directory in line]
        for process in Path("/proc").glob("[0-9]*"):
            with suppress(OSError):
                said = (process / "cmdline").read_bytes() + (process / "environ").read_bytes()
                spaces = {os.readlink(space) for space in (process / "ns").iterdir()}
                if self.directory.encode() in said or (process.name in self.processes and spaces & self.namespaces):
                    found.append(f"process {process.name}: {said[:80]!r}")
        return found


def around() -> set[str]:
    """Everything of this kind that there is on this machine, whosever: for when nothing is known of the cluster yet."""
    found = {str(path) for path in keeper.STATE.glob(f"{keeper.PREFIX}{ME}*")}
    return found | {path.name for path in Path("/proc").glob("[0-9]*") if ME in _line(path)}


def _line(process: Path) -> str:
    with suppress(OSError):
        return (process / "cmdline").read_text(errors="replace")
    return ""


@pytest.fixture(scope="module")
def running() -> Iterator[Path]:
    """The directory of a cluster of three nodes, shared: whoever breaks something mends it."""
    if reason:
        pytest.skip(reason)
    said = cluster("up", "--nodes", "3", name=ME, cwd=Path("/"))
    assert said.stdout == f"export SLURM_CONF={keeper.directory_of(ME)}/etc/slurm.conf\n"  # for eval "$(…)", and nothing else
    try:
        yield keeper.directory_of(ME)
    finally:
        cluster("down", name=ME)


def status() -> dict[str, dict[str, Any]]:
    return {node["name"]: node for node in json.loads(act("status", "--json"))["nodes"]}


def slurm(directory: Path, *argv: str, user: bool = False) -> subprocess.CompletedProcess[str]:
    """A client on this machine, with nothing but the variable that `up` printed."""
    become = ["setpriv", "--reuid=nobody", "--regid=nogroup", "--clear-groups"] if user else []
    environ = {"PATH": os.environ["PATH"], "SLURM_CONF": str(directory / "etc" / "slurm.conf")}
    return subprocess.run([*become, *argv], env=environ, cwd="/", capture_output=True, text=True, timeout=120)


# --- use -------------------------------------------------------------------------------------------------------------


def test_anybody_may_use_it(running: Path) -> None:
    ran = slurm(running, "srun", "--nodes=3", "hostname")
    assert sorted(ran.stdout.split()) == ["n1", "n2", "n3"], ran.stderr
    ran = slurm(running, "srun", "--nodes=2", "id", "-un", user=True)
    assert ran.stdout.split() == ["nobody", "nobody"], ran.stderr


def test_but_its_keys_are_roots_and_so_are_its_faults(running: Path) -> None:
    for secret in ("munge/key", "etc/slurm.key"):
        assert slurm(running, "cat", f"{running}/{secret}", user=True).returncode != 0
        assert (running / secret).stat().st_mode & 0o077 == 0
    assert slurm(running, "touch", f"{running}/etc/mine", user=True).returncode != 0


def test_nodes_share_the_cores_and_ranks_have_no_more_threads(running: Path) -> None:
    cores = sorted(os.sched_getaffinity(0))
    shares = [line.split() for line in (running / "etc" / "cores").read_text().splitlines()]
    assert [node for node, _ in shares] == ["n1", "n2", "n3"]
    assert all(set(map(int, own.split(","))) <= set(cores) for _, own in shares)
    show = ["srun", "--nodes=3", "--ntasks-per-node=1", "bash", "-c", "echo $OMP_NUM_THREADS $(env -u OMP_NUM_THREADS nproc)"]
    conf = {**os.environ, "SLURM_CONF": str(running / "etc" / "slurm.conf")}
    each = max(1, len(cores) // 3)
    for asked, given in (("99", each), ("1", 1)):
        ran = subprocess.run(show, env=conf | {"OMP_NUM_THREADS": asked}, capture_output=True, text=True, timeout=120)
        assert ran.stdout.splitlines() == [f"{given} {each}"] * 3, ran


@pytest.mark.parametrize(("cores", "nodes", "shares"), [
    ([0, 1, 2, 3], "ab", [(0, 1), (2, 3)]), ([0, 2, 3], "ab", [(0,), (2,)]), ([4, 5], "abcd", [(4,), (5,), (4,), (5,)])])
def test_cores_are_shared_out(cores: list[int], nodes: str, shares: list[tuple[int, ...]]) -> None:
    assert shared_out(cores, nodes) == dict(zip(nodes, shares, strict=True))
    assert shared_out([], nodes) == {}


def test_what_it_is(running: Path) -> None:
    wait_until(lambda: all(node["state"] == "idle" for node in status().values()), "the end of what ran before")
    nodes = status()
    assert {name: (node["switch"], node["state"], node["cable"]) for name, node in nodes.items()} == {
        "n1": ("s1", "idle", {"up": True, "rate": None}), "n2": ("s1", "idle", {"up": True, "rate": None}),
        "n3": ("s2", "idle", {"up": True, "rate": None})}
    assert f"export SLURM_CONF={running}/etc/slurm.conf" in act("status")


def test_up_twice_says_how_to_use_it(running: Path) -> None:
    said = cluster("up", name=ME, code=2).stderr
    assert f"cluster {ME}: is already up" in said and f"export SLURM_CONF={running}" in said and "lab down" in said


def test_cables_have_rates_and_ends(running: Path) -> None:
    act("shape", "200mbit")
    act("shape", "1.5Gbit", "n2")
    assert [node["cable"]["rate"] for node in status().values()] == [200_000_000, 1_500_000_000, 200_000_000]
    act("shape", "off", "n1")
    assert [node["cable"]["rate"] for node in status().values()] == [None, 1_500_000_000, 200_000_000]
    assert "1.5gbit" in act("status")
    act("shape", "off")
    act("link", "n3", "down")
    assert status()["n3"]["cable"] == {"up": False, "rate": None}
    act("link", "n3", "up")
    assert [node["cable"] for node in status().values()] == [{"up": True, "rate": None}] * 3


def test_a_node_is_killed_and_booted(running: Path) -> None:
    assert cluster("at", "n2", "hostname", name=ME).stdout == "n2\n"
    assert cluster("at", "n2", "sh", "-c", "exit 7", name=ME, code=7).stdout == ""
    act("kill", "n2")
    assert "node n2: is already off" in act("kill", "n2", code=2)
    assert "node n2: is off" in act("at", "n2", "true", code=2)
    act("boot", "n2")
    assert "node n2: is on" in act("boot", "n2", code=2)
    assert cluster("at", "n2", "hostname", name=ME).stdout == "n2\n"
    wait_until(lambda: status()["n2"]["state"] == "idle", "n2 idle again")


HEAVY = "import sys, time; held = bytearray(b'1' * (300 << 20)); print('ready', flush=True); time.sleep(600)"


def test_what_was_killed_is_gone(running: Path) -> None:
    """Also what takes a moment to die, for it may have a port that it takes when the node is booted again."""
    lab = LabCluster(running)
    command = [*lab.inside("n3"), "--no-fork", "sh", "-c", '"$@"; exit $?', "sh", sys.executable, "-c", HEAVY]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as heavy:
        assert heavy.stdout is not None and heavy.stdout.readline() == "ready\n"
        (pid,) = (each for each in lab.processes("n3") if "held = bytearray" in _line(Path(f"/proc/{each}")))
        lab.kill("n3")
        assert not Path(f"/proc/{pid}/fd/1").is_symlink(), "it has its files still"
    lab.boot("n3")
    wait_until(lambda: status()["n3"]["state"] == "idle", "n3 idle again")


@pytest.mark.parametrize(("words", "said"), table(__file__, "cluster_up.toml", "refused"),
                         ids=lambda value: "-".join(value) if isinstance(value, list) else "")
def test_what_it_does_not_take(running: Path, words: tuple[str, ...], said: str) -> None:
    assert said in act(*words, code=2)
    assert all(node["cable"] == {"up": True, "rate": None} for node in status().values())


# --- the end ---------------------------------------------------------------------------------------------------------


@needs_slurm
def test_it_outlives_its_terminal_and_down_leaves_nothing(tmp_path: Path) -> None:
    name = f"{ME}-a"
    before = around()
    pid, terminal = pty.fork()
    if pid == 0:
        os.execv(sys.executable, [*COMMAND, "up", "--nodes", "1", "--name", name])
    said = b""
    with suppress(OSError):  # the end of a terminal
        while part := os.read(terminal, 4096):
            said += part
    os.close(terminal)  # its session gets SIGHUP
    assert os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1]) == 0
    assert b"1 idle nodes" in said and b"hpc-mp launch job.toml --on slurm --wait" in said

    directory = keeper.directory_of(name)
    assert slurm(directory, "srun", "hostname").stdout == "n1\n"
    traces = Traces.of(directory)
    assert len(traces.left()) > 5
    cluster("down", name=name)
    assert traces.left() == [] and around() == before
    assert f"--name {name}: no such cluster is up" in cluster("down", name=name, code=2).stderr


def test_down_waits_for_the_end_of_the_keeper(tmp_path: Path) -> None:
    """It takes the directory away before it ends itself."""
    directory = tmp_path / "cluster"
    directory.mkdir()
    heard, says = os.pipe()
    pid = os.fork()
    if pid == 0:
        fcntl.flock(os.open(directory, os.O_RDONLY), fcntl.LOCK_EX)
        os.write(says, b"!")
        time.sleep(0.5)
        directory.rmdir()
        time.sleep(2)
        os.write(says, b"end")
        os._exit(0)
    os.read(heard, 1)
    keeper.stop(directory)
    os.set_blocking(heard, False)
    assert os.read(heard, 3) == b"end"
    os.waitpid(pid, 0)
    for descriptor in (heard, says):
        os.close(descriptor)


def keeper_of(directory: Path) -> int:
    """The grandparent of its first process, which `unshare` has started."""
    pid = first_process(directory)
    for _ in range(2):
        (parent,) = (line for line in Path(f"/proc/{pid}/status").read_text().splitlines() if line.startswith("PPid:"))
        pid = int(parent.split()[1])
    return pid


@needs_slurm
@pytest.mark.parametrize("kill", [keeper_of, first_process], ids=["keeper", "first process"])
def test_nothing_is_left_when_half_of_it_is_killed(kill: Callable[[Path], int]) -> None:
    name = f"{ME}-b"
    cluster("up", "--nodes", "1", name=name)
    traces = Traces.of(keeper.directory_of(name))
    os.kill(kill(keeper.directory_of(name)), signal.SIGKILL)
    wait_until(lambda: not traces.left(), "nothing left")
    assert name not in keeper.names()


@needs_slurm
@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGKILL, signal.SIGHUP])
def test_nothing_is_left_of_an_up_that_is_interrupted(number: signal.Signals, tmp_path: Path) -> None:
    """Half way it stays, for its controller does nothing."""
    name = f"{ME}-c"
    real = shutil.which("slurmctld", path=f"{os.environ['PATH']}:{SBIN}")
    executable(tmp_path / "slurmctld", f'#!/bin/sh\n[ "$1" = -V ] && exec {real} -V\nexec sleep 600\n')
    environ = {**os.environ, "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    before = around()
    directory = keeper.directory_of(name)
    pipe = subprocess.PIPE
    words = [*COMMAND, "up", "--nodes", "2", "--name", name]
    with subprocess.Popen(words, stdout=pipe, stderr=pipe, text=True, env=environ) as starting:
        wait_until(lambda: (directory / "etc" / "network").exists(), "half way up", pause=0.001)
        traces = Traces.of(directory)
        starting.send_signal(number)
        out, err = starting.communicate(timeout=120)
        assert starting.returncode and not out
        assert number != signal.SIGINT or "interrupted" in err
    wait_until(lambda: not traces.left() and around() == before, "nothing left")


@needs_slurm
def test_what_a_power_cut_left_does_not_stop_the_next(running: Path) -> None:
    name = f"{ME}-d"
    old = keeper.directory_of(name)
    (old / "etc").mkdir(parents=True)
    (old / "etc" / "name").write_text("lab99\n")
    (old / "stale").touch()
    assert name not in keeper.names()
    cluster("up", "--nodes", "1", name=name)
    assert not (old / "stale").exists() and (old / "etc" / "name").read_text() != "lab99\n"
    assert ME in (said := cluster("status", name="third", code=2).stderr) and name in said
    assert "clusters are up" in cluster("status", code=2).stderr  # other tests' may be up too
    cluster("down", name=name)


@needs_slurm
def test_a_machine_that_refuses_namespaces() -> None:
    """Root without rights, as in a container."""
    weak = ["setpriv", "--bounding-set=-all", "--inh-caps=-all"]
    done = subprocess.run([*weak, *COMMAND, "up", "--name", f"{ME}-e"], capture_output=True, text=True, timeout=120)
    assert done.returncode == 2 and "this machine refuses (unshare: " in done.stderr and "--privileged" in done.stderr


# --- the whole way ---------------------------------------------------------------------------------------------------


@pytest.mark.prove
@needs_slurm
def test_from_nothing_to_a_trained_model_on_four_hosts_in_a_minute() -> None:
    root = Path(__file__).resolve().parents[2]
    start = time.monotonic()
    done = subprocess.run([sys.executable, root / "benchmarks" / "cluster_up.py", "--rounds", "1", "--name", f"{ME}-f"],
                          capture_output=True, text=True, timeout=300)
    seconds = time.monotonic() - start
    print(done.stdout)
    assert done.returncode == 0, done.stderr
    assert seconds < 60, f"{seconds:.0f} s, with a load of {os.getloadavg()[0]:.1f} on {os.cpu_count()} cores"
