"""The test cluster itself: hosts that are hosts, faults that are faults, and nothing left behind."""

import os
import shlex
import signal
import subprocess
import sys
import time
import uuid
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path

import pytest
from slurm_lab.chroot import built, why_not_built
from slurm_lab.lab import USER, Lab, LabError, wait_until
from slurm_lab.why_not import why_not

reason = why_not()
pytestmark = pytest.mark.skipif(reason is not None, reason=str(reason))

RECEIVE = """
import socket, sys, time
server = socket.create_server(("", 7777)); server.settimeout(90)
print("listening", flush=True)
peer, _ = server.accept(); got = 0
while part := peer.recv(1 << 20): got += len(part)
print(got, time.monotonic())
"""
SEND = """
import socket, sys, time
print(time.monotonic())
socket.create_connection((sys.argv[1], 7777), 90).sendall(bytes(int(sys.argv[2])))
"""


def traces(lab: Path, number: int) -> list[str]:
    """What is there of one lab (others may run at the same time): processes, interfaces, mounts, directories."""
    found = [str(path) for path in (lab, Path(f"/sys/class/net/slurmlab{number}")) if path.exists()]
    found += [line for line in Path("/proc/self/mounts").read_text().splitlines() if lab.name in line]
    for process in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            command = (process / "cmdline").read_bytes()
            if lab.name.encode() in command + (process / "environ").read_bytes():
                found.append(command.replace(b"\0", b" ").decode())
    return found


def rate(lab: Lab, sender: str, receiver: str, megabytes: int) -> float:
    """Mbit/s of one TCP connection between two nodes, from before it is made to its end."""
    with ThreadPoolExecutor() as pool:
        received = pool.submit(lab.fabric, *lab.network_of(receiver), sys.executable, "-c", RECEIVE)
        wait_until(lambda: "7777" in lab.at(receiver, ["ss", "-ltn"]).stdout, "listening")
        began = float(lab.fabric(*lab.network_of(sender), sys.executable, "-c", SEND, receiver, str(megabytes << 20)))
        got, ended = map(float, received.result().split()[-2:])
        return got * 8e-6 / (ended - began)


def test_nodes_share_files_but_no_tmp(lab: Lab) -> None:
    (lab.share / "common").write_text("seen")
    assert lab.at("n1", ["cat", str(lab.share / "common")]).stdout == "seen"
    own = f"of-n1-{uuid.uuid4()}"  # No other program of this machine has a file of that name.
    lab.at("n1", ["touch", f"/tmp/{own}", f"/dev/shm/{own}"])
    assert lab.at("n1", ["ls", "/tmp", "/dev/shm"]).stdout.count(own) == 2
    assert lab.at("n2", ["ls", "/tmp", "/dev/shm"]).stdout.count(own) == 0
    assert not Path(f"/tmp/{own}").exists() and not Path(f"/dev/shm/{own}").exists()


def test_ordinary_user_submits_and_runs_this_python(lab: Lab) -> None:
    python = shlex.quote(sys.executable)
    show = f'#!/bin/bash\nid -un; echo "$HOME"; {python} -c "import click; print(click.__name__)"; touch made\n'
    for export in ("ALL", "NONE"):  # NONE: the environment comes from the node's /etc/passwd
        home = lab.share / "home"
        job = lab.sbatch(f"--export={export}", "--output=out.txt", user=USER, cwd=home, input=show)
        assert lab.wait_job(job)["JobState"] == "COMPLETED"
        assert (home / "out.txt").read_text().split() == [USER, str(home), "click"]
        assert (home / "made").stat().st_uid == (home / "out.txt").stat().st_uid != 0


@pytest.mark.prove  # Slurm takes 15 s to miss a node
def test_killed_node_is_found_down_and_comes_back(lab: Lab) -> None:
    # no srun, which may end with an error, and the job with it, before the controller misses the node
    job = lab.sbatch("--nodes=2", "--nodelist=n[3-4]", "--no-requeue", "--wrap=sleep 100")
    try:
        lab.wait_job(job, "RUNNING")
        lab.kill("n4")
        with pytest.raises(LabError, match="n4 is not running"):
            lab.at("n4", ["true"])
        assert lab.wait_job(job, timeout=40)["JobState"] == "NODE_FAIL"
        assert "n4" in lab.run(["sinfo", "--noheader", "--states=down", "--format=%N"]).stdout
    finally:
        lab.mend()
    assert lab.run(["srun", "--nodelist=n4", "hostname"], check=True).stdout == "n4\n"


def dead_children(parents: Sequence[int]) -> list[str]:
    """The zombies of these processes, as their stat files have them."""
    found = []
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            state, parent = stat.read_text().rpartition(")")[2].split()[:2]
            if state == "Z" and int(parent) in parents:
                found.append(stat.read_text())
    return found


def test_the_first_processes_of_the_lab_and_of_its_nodes_reap_their_orphans(lab: Lab) -> None:
    """Double forks, as daemons make them, and steps of Slurm: nothing stays dead in the table of processes."""
    firsts = [lab._init_of(node) for node in (None, *lab.nodes)]
    for first in firsts:
        for _ in range(5):
            inside = ["nsenter", f"--target={first}", "--mount", "--pid"]
            subprocess.run([*inside, "bash", "-c", "(sleep 0.1 &); (sleep 0.2 &)"], check=True)
    lab.run(["srun", "--nodes=2", "bash", "-c", "setsid sleep 0.2 & exit 0"], timeout=60, check=True)
    wait_until(lambda: not dead_children(firsts), "orphans reaped")


def test_a_zombie_would_be_seen() -> None:
    dead = subprocess.Popen(["true"])
    wait_until(lambda: dead_children([os.getpid()]) != [], "a zombie")
    dead.wait()
    assert dead_children([os.getpid()]) == []


def test_cable_pulled_and_put_back(lab: Lab) -> None:
    def answers(seconds: int) -> bool:
        return lab.at("n1", ["timeout", str(seconds), "bash", "-c", "exec 3<>/dev/tcp/n3/6818"]).returncode == 0

    assert answers(50)
    lab.link("n3", False)
    assert not answers(3)
    lab.link("n3", True)
    wait_until(lambda: answers(10), "n3 answers")
    lab.mend()


def test_shaped_links(lab: Lab) -> None:
    try:
        lab.shape("200mbit")
        lab.shape("20mbit", ["n3"])
        assert 70 < rate(lab, "n1", "n2", 32) < 230  # what keeps its ends from a processor makes a link look slower
        assert 7 < rate(lab, "n1", "n3", 4) < 28
    finally:
        lab.unshape()
    assert rate(lab, "n1", "n3", 256) > 400


def test_side_by_side_and_nothing_left() -> None:
    """Two labs at once, one with GPUs and lines of its own; what is left running in one ends with it."""
    with Lab(2, gpus=2, overrides={"JobAcctGatherParams": "OverMemoryKill"}) as one, Lab(3) as two:
        here = "\n".join(traces(one.directory, one.number))
        assert all(trace in here for trace in ("slurmctld", "slurmd", "munged", "init.sh", "/sys/class/net", "/var/tmp"))
        ran = one.run(["srun", "--nodes=2", "--gpus-per-node=2", "printenv", "CUDA_VISIBLE_DEVICES"], check=True)
        assert ran.stdout.split() == ["0,1", "0,1"]
        assert "OverMemoryKill" in one.run(["scontrol", "show", "config"]).stdout
        assert sorted(two.run(["srun", "--nodes=3", "hostname"], check=True).stdout.split()) == ["n1", "n2", "n3"]
        forgotten = one.popen(["srun", "sleep", "300"])
        wait_until(lambda: one.run(["squeue", "--noheader", "--states=RUNNING"]).stdout, "the step runs")
        one.down()
        assert forgotten.wait(60) == -signal.SIGKILL
        assert traces(one.directory, one.number) == []
        assert two.run(["srun", "--nodes=3", "hostname"], check=True).returncode == 0
    assert traces(two.directory, two.number) == []


def test_a_lab_that_cannot_start_says_why_and_leaves_nothing() -> None:
    bad = Lab(1, overrides={"SelectType": "select/nonsense"}, patience=2)
    with pytest.raises(LabError) as failed:
        bad.up()
    assert "select/nonsense" in "".join(failed.value.__notes__)
    assert traces(bad.directory, bad.number) == []


@pytest.mark.prove  # a database takes 10 s to start
@pytest.mark.skipif(why_not(accounting=True) is not None, reason=str(why_not(accounting=True)))
def test_accounting() -> None:
    with Lab(2, accounting=True) as lab:
        job = lab.sbatch("--account=acc", "--wrap=exit 3", user=USER)
        lab.wait_job(job)
        show = ["sacct", "--noheader", "--allocations", "--parsable2", f"--jobs={job}", "--format=State,ExitCode,User,Account"]
        wait_until(lambda: lab.run(show).stdout == f"FAILED|3:0|{USER}|acc\n", "accounted")


def test_why_not_names_the_packages(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    assert why_not(accounting=True) == (
        "a Slurm lab needs these Debian packages: apt-get install slurm-wlm slurm-client munge iproute2 util-linux nftables "
        "slurmdbd mariadb-server-core mariadb-client-core")
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    assert "needs root" in str(why_not())


def test_lab_refuses_time_without_end(lab: Lab) -> None:
    with pytest.raises(subprocess.TimeoutExpired):
        lab.run(["srun", "sleep", "300"], timeout=1)
    lab.mend()


@pytest.mark.prove
@pytest.mark.skipif(why_not_built() is not None, reason=str(why_not_built()))
def test_newer_slurm_in_a_chroot() -> None:
    with Lab(chroot=built(), gpus=2) as lab:
        assert lab.run(["sinfo", "--version"]).stdout.startswith("slurm-wlm 24.11")
        start = time.monotonic()
        ran = lab.run(["srun", "--nodes=4", "hostname"], user=USER, check=True)
        assert sorted(ran.stdout.split()) == ["n1", "n2", "n3", "n4"]
        lab.wait_idle()
        assert time.monotonic() - start < 9  # it is 10 s where the submitting host's name does not resolve
        job = lab.sbatch("--nodes=2", "--gpus-per-node=2", f"--wrap=srun {sys.executable} -c 'import click'", user=USER)
        assert lab.wait_job(job)["JobState"] == "COMPLETED"
        lab.kill("n4")
        lab.boot("n4")
        assert lab.at("n4", ["slurmd", "-V"]).stdout.startswith("slurm-wlm 24.11")
    assert traces(lab.directory, lab.number) == []


def test_a_lab_ends_although_a_fork_holds_its_pipe(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_mp_lab.lab.END_S", 0.5)
    lab = Lab(1)
    lab.__enter__()
    child = os.fork()
    if child == 0:
        signal.pause()
    try:
        lab.__exit__(None, None, None)
        assert lab.process.returncode == -signal.SIGKILL and not lab.directory.exists()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)
