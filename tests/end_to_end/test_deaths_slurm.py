"""What dies on a real Slurm without a word, and the run goes on by itself: supervisors, daemons, ranks before they have met."""

import errno
import json
import os
import re
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import lab_runs
import pytest
from lab_runs import completes, first_end, job_ends, kill_supervisor, logs_of, running, submitted, until_ended, with_fault
from slurm_jobs import TWO, command, steps, submit, until
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory, read_json
from hpc_mp.rundir.history import history

pytestmark = pytest.mark.timeout(900)

PACED = (*TWO, "train.steps=40", "checkpoint.every=10")


def trains(lab: Cluster, job: Path, pause: float, least: int, *more: str) -> tuple[RunDirectory, str]:
    """Submit a job whose steps take so many seconds more, and wait until it has done the least number of them."""
    run, job_id = submit(lab, job, (*PACED, *with_fault(job, f"time.sleep({pause})"), *more))
    until(lambda: steps(run) >= least, "training")
    return run, job_id


def left_out(run: RunDirectory, node: str) -> bool:
    return node not in read_json(run.attempt_record)["hosts"]


MOMENTS: dict[str, Callable[[Cluster, RunDirectory], object]] = {
    "at once": lambda lab, run: running(lab, run, "hpc_mp.supervisor"),
    "before the ranks": lambda lab, run: run.attempt_record.exists(),
    "training": lambda lab, run: steps(run) >= 13,
    "saving": lambda lab, run: lab_runs.saving(run),
    "after the ranks": lambda lab, run: running(lab, run, "node-end.sh"),
}


@pytest.mark.parametrize("moment", [
    pytest.param(moment, marks=() if moment == "training" else pytest.mark.prove) for moment in MOMENTS])
def test_a_supervisor_that_is_killed_loses_nothing(lab: Cluster, job: Path, moment: str) -> None:
    """The job was FAILED, without a cause and without a line of its history."""
    run, job_id = trains(lab, job, 0.1, 0)
    until(lambda: MOMENTS[moment](lab, run), moment)
    kill_supervisor(lab, run)
    completes(lab, job_id, run, job, PACED)
    assert lab_runs.ended(run).state == "completed"
    *before, last = history(run)
    assert (last.kind, last.action) == ("completed", "done")
    if moment == "after the ranks":
        assert not before
        return
    [killed] = before
    assert (killed.kind, killed.action, killed.node) == ("supervisor", "requeue", "n1"), killed
    assert "supervisor on n1 was killed by SIGKILL" in killed.message
    if moment == "training":  # its ranks have saved
        assert killed.step >= 13


# The errors of one node's write to the run's checkpoints, planted in the function that writes a shard.
REFUSES = """
import hpc_mp.train.checkpoint.checkpoint as saving
def refused(*_):
    import errno, os
    raise OSError(errno.{error}, os.strerror(errno.{error}))
saving.write_shard = refused
"""


def refused(lab: Cluster, job: Path, error: str) -> tuple[RunDirectory, str]:
    return submit(lab, job, (*PACED, *with_fault(job, f"exec({REFUSES.format(error=error)!r})", step=15)))


@pytest.mark.parametrize("error", ["EROFS", *(pytest.param(each, marks=pytest.mark.prove) for each in ("EACCES", "EIO"))])
def test_a_run_that_cannot_save_on_one_node_goes_on_without_it(lab: Cluster, job: Path, error: str) -> None:
    """It trained to its end, and had its first checkpoint alone."""
    run, job_id = refused(lab, job, error)
    completes(lab, job_id, run, job, PACED)
    first, last = history(run)
    assert (first.kind, first.nodes, first.node, first.step) == ("unwritable", ("n2",), "n2", 10), first
    for words in ("2 checkpoints in a row could not be saved", os.strerror(getattr(errno, error))):
        assert words in first.message
    assert last.kind == "completed" and left_out(run, "n2")


@pytest.mark.prove
@pytest.mark.parametrize("error", ["ENOSPC", "EDQUOT"])
def test_a_full_disk_stops_the_run_and_blames_no_node(lab: Cluster, job: Path, error: str) -> None:
    run, job_id = refused(lab, job, error)
    job_ends(lab, job_id, run, "FAILED")
    [end] = history(run)
    assert (end.kind, end.nodes, end.action) == ("space", (), "fail"), end


@contextmanager
def read_only(lab: Cluster, nodes: Sequence[str], directory: Path) -> Iterator[None]:
    """The directory is mounted read-only on these nodes. What is open there stays writable, as after errors of a file system."""
    for node in nodes:
        for options in (["--bind"], ["-o", "remount,bind,ro"]):
            done = lab.at(node, ["mount", *options, str(directory), str(directory)])
            assert done.returncode == 0, done.stderr
    try:
        yield
    finally:
        for node in nodes:
            lab.at(node, ["umount", "--lazy", str(directory)])


@pytest.mark.prove
@pytest.mark.parametrize("directory", ["run", "checkpoints"])
def test_a_file_system_that_one_node_has_read_only_is_left_with_the_node(lab: Cluster, job: Path, directory: str) -> None:
    run, job_id = trains(lab, job, 0.2, 12)
    with read_only(lab, ["n2"], run.path if directory == "run" else run.checkpoints):
        job_ends(lab, job_id, run)
    completes(lab, job_id, run, job, PACED)
    first, last = history(run)
    assert (first.kind, first.nodes, first.rank, first.step) == ("unwritable", ("n2",), 1, 10), first
    assert os.strerror(errno.EROFS) in first.message and last.kind == "completed" and left_out(run, "n2")


@pytest.mark.prove
@pytest.mark.parametrize("directory", ["run", "checkpoints"])
def test_a_file_system_that_all_nodes_have_read_only_is_no_nodes_fault(lab: Cluster, job: Path, directory: str) -> None:
    run, job_id = trains(lab, job, 0.2, 12, "slurm.retries=0")
    with read_only(lab, lab.nodes, run.path if directory == "run" else run.checkpoints):
        job_ends(lab, job_id, run, "FAILED")
    assert os.strerror(errno.EROFS) in logs_of(run)
    if directory == "run":  # not a word of the attempt could be written down, not even its steps: Slurm alone tells of its end
        assert not run.outcome.exists() and not run.history.exists()
    else:
        [end] = history(run)
        assert (end.kind, end.nodes, end.action, end.step) == ("storage", (), "fail", 10), end
    told = json.loads(command(lab, "status", run.path, "--json").stdout)
    assert told["state"] == "failed" and os.strerror(errno.EROFS) in told["cause"], told


# What befalls the first task of a job's node, once, before it has loaded its packages; the file gets the node's name.
ABSENT = """
import os, signal, sys, time
if os.environ.get("SLURM_LOCALID") == "0" and os.environ["SLURM_NODEID"] == "{number}" and not os.path.exists({once!r}):
    if {entry!r} in open("/proc/self/cmdline").read():
        with open({once!r} + " begun", "w") as file:
            file.write(os.environ["SLURMD_NODENAME"])
        os.rename({once!r} + " begun", {once!r})
        {deed}
"""
STOPS, SLEEPS = "os.kill(os.getpid(), signal.SIGSTOP)", "time.sleep(3600)"


def absent(job: Path, deed: str, number: int, entry: str) -> str:
    """The override that plants it on a node of the job, by its number there."""
    place = job.parent / "fault"
    place.mkdir()
    (place / "sitecustomize.py").write_text(ABSENT.format(once=str(job.parent / "once"), deed=deed, number=number, entry=entry))
    return f"environment.set.PYTHONPATH={place}"


@pytest.mark.parametrize(("deed", "rank"), [
    (STOPS, 1), *(pytest.param(deed, rank, marks=pytest.mark.prove) for deed, rank in ((SLEEPS, 1), (STOPS, 0), (SLEEPS, 0)))])
def test_a_rank_that_does_not_come_to_the_meeting_is_named(lab: Cluster, job: Path, deed: str, rank: int) -> None:
    run, job_id = submit(lab, job, (*PACED, absent(job, deed, rank, "train"), "job.meet_timeout=15"))
    first = first_end(run, 100)
    node = (job.parent / "once").read_text()
    assert (first.kind, first.rank, first.node, first.action) == ("silent", rank, node, "requeue"), first
    completes(lab, job_id, run, job, PACED)


@pytest.mark.prove
def test_a_node_that_freezes_before_its_rank_has_come_is_named(lab: Cluster, job: Path) -> None:
    run, job_id = submit(lab, job, (*PACED, absent(job, SLEEPS, 1, "train"), "job.meet_timeout=15"))
    until((job.parent / "once").exists, "the rank on the second node", 100)
    node = (job.parent / "once").read_text()
    lab_runs.send(signal.SIGSTOP, lab.processes(node))  # not its network
    try:
        first = first_end(run, 200)
        assert (first.node, first.action) == (node, "requeue") and first.kind in ("silent", "lost", "node"), first
        job_ends(lab, job_id, run)
    finally:
        lab.kill(node)
    completes(lab, job_id, run, job, PACED)


@pytest.mark.prove
def test_a_suspended_run_has_not_lost_its_nodes(lab: Cluster, job: Path) -> None:
    """Slurm stops ranks, watches and supervisor for longer than any of them waits for another."""
    run, job_id = trains(lab, job, 0.2, 8, "job.heartbeat_timeout=6", "job.step_timeout=12")
    lab.run(["scontrol", "suspend", job_id], check=True)
    before = steps(run)
    time.sleep(25)
    assert steps(run) <= before + 1, "it was not suspended"
    lab.run(["scontrol", "resume", job_id], check=True)
    completes(lab, job_id, run, job, PACED)
    assert [end.kind for end in history(run)] == ["completed"]


def kill_stepd(lab: Cluster, node: str, step: str = "[1-9]") -> None:
    """The slurmstepd of the ranks of a node, which live on: step 0 prepares the nodes."""
    [pid] = [pid for pid in lab.processes(node) if re.match(rf"slurmstepd: \[\d+\.{step}", lab_runs.command_line(pid))]
    os.kill(pid, signal.SIGKILL)


def check_orphaned(run: RunDirectory, node: str, timeout: float) -> None:
    first = first_end(run, timeout)
    assert (first.kind, first.nodes, first.node, first.action) == ("orphaned", (node,), node, "requeue"), first


@pytest.mark.prove
def test_the_script_that_loses_its_slurmstepd_is_a_fault_of_its_node(lab: Cluster, job: Path) -> None:
    """Slurm queues the job again and gives no reason: somebody had asked for that, it was said, and no host was named."""
    run, job_id = trains(lab, job, 1, 3)
    kill_stepd(lab, "n1", "batch")
    lab.run(["scontrol", "requeue", job_id])  # Slurm does so once the node registers
    check_orphaned(run, "n1", 100)
    completes(lab, job_id, run, job, PACED)


# A program that goes on from its last step, of one rank per task or with two processes below the one task of a node.
RESUMES = """
    import subprocess
    def work(rank):
        mine = f"state-{{rank}}"
        asked = []
        signal.signal(signal.SIGTERM, lambda *_: asked.append(1))
        begin = int(open(mine).read()) if os.path.exists(mine) else 0
        for step in range(begin, 30):
            {say}
            time.sleep(0.3)
            open(mine + ".new", "w").write(str(step + 1))
            os.replace(mine + ".new", mine)  # a kill may come at any moment
            if asked:
                sys.exit(0)
    if {per_node} and len(sys.argv) == 1:
        workers = [subprocess.Popen([sys.executable, __file__, str(2 * rank + each)]) for each in range(2)]
        signal.signal(signal.SIGTERM, lambda number, _: [worker.send_signal(number) for worker in workers])
        sys.exit(max(worker.wait() for worker in workers))
    work(int(sys.argv[1]) if {per_node} else rank)
"""
PROGRAMS = {"per rank": ("rank", "print('step', step)"), "per node": ("node", "print('step', step)"), "silent": ("rank", "pass")}


def stepped(here: Path, least: int) -> bool:
    done = [int(path.read_text()) for path in here.glob("state-?")]
    return len(done) == 4 and min(done) >= least


def program_of(here: Path, kind: str) -> tuple[list[str], tuple[str, ...]]:
    start, say = PROGRAMS[kind]
    command = lab_runs.program(here, RESUMES.format(per_node=start == "node", say=say))
    text = (here / "program.py").read_text()  # the command of a node has no rank
    (here / "program.py").write_text(text.replace("'RANK'", "'NODE_RANK'") if start == "node" else text)
    return command, ("--set", f"program.start={start}", "--set", 'program.signal="TERM"')


def started(lab: Lab, job: Path, kind: str, *more: str) -> tuple[RunDirectory, Callable[[], None]]:
    """Start our own engine or a program, wait for some steps, and return the run and the check of its end."""
    if kind == "engine":
        run, job_id = trains(lab, job, 0.1, 13)
        return run, lambda: completes(lab, job_id, run, job, PACED)
    command, options = program_of(job.parent, kind)
    run = submitted(lab, job.parent, command, *options, *more)
    until(lambda: stepped(job.parent, 5), "its steps")

    def check_end() -> None:
        assert until_ended(run, 120).state == "completed" and stepped(job.parent, 30), logs_of(run)

    return run, check_end


@pytest.mark.parametrize("node", ["n2", pytest.param("n1", marks=pytest.mark.prove)])
@pytest.mark.parametrize("kind", [
    "engine", "silent", *(pytest.param(each, marks=pytest.mark.prove) for each in ("per rank", "per node"))])
def test_ranks_that_lose_their_slurmstepd_are_a_fault_of_their_node(lab: Lab, job: Path, kind: str, node: str) -> None:
    """They lived on. A run of ours ended a minute later, on the first node without blame; a program hung until its time limit, or
    one of its ranks was blamed."""
    run, check_end = started(lab, job, kind)
    kill_stepd(lab, node)
    check_orphaned(run, node, 60)
    assert kind == "engine" or not [pid for pid in lab.processes(node) if "program.py" in lab_runs.command_line(pid)]
    check_end()
    assert left_out(run, node)


# A program whose ranks wait for each other.
WAITS = """
    open(f"came-{rank}", "w").close()
    while not all(os.path.exists(f"came-{other}") for other in range(int(os.environ['WORLD_SIZE']))):
        time.sleep(0.1)
"""


@pytest.mark.prove
@pytest.mark.parametrize(("deed", "place"), [(STOPS, 1), (SLEEPS, 0)])
def test_a_programs_rank_that_never_begins_is_named(lab: Lab, here: Path, deed: str, place: int) -> None:
    """It was silent for an hour, with all others."""
    fault = absent(here / "job.toml", deed, place, "hpc_mp.program")
    run = submitted(lab, here, lab_runs.program(here, WAITS), "--set", fault, "--set", "job.meet_timeout=5")
    first = first_end(run, 150)
    node = (here / "once").read_text()
    assert (first.kind, first.rank, first.node, first.action) == ("silent", 2 * place, node, "requeue"), first
    assert until_ended(run, 120).state == "completed", logs_of(run)


@pytest.mark.parametrize(("kind", "resumes"), [
    ("per rank", "true"), pytest.param("per node", "true", marks=pytest.mark.prove),
    pytest.param("per rank", "false", marks=pytest.mark.prove)])
def test_a_programs_supervisor_that_is_killed_loses_nothing(lab: Lab, job: Path, kind: str, resumes: str) -> None:
    """Ranks that would begin anew are left to end: a program that had ended well was started again."""
    run, check_end = started(lab, job, kind, "--set", f"program.resumes={resumes}")
    kill_supervisor(lab, run)
    check_end()
    *before, last = history(run)
    assert (last.kind, last.action) == ("completed", "done")
    ends = [(end.kind, end.node, end.action) for end in before]
    assert ends == ([("supervisor", "n1", "requeue")] if resumes == "true" else [])


@pytest.mark.prove
@pytest.mark.parametrize("kind", ["engine", "per rank"])
def test_a_stop_asked_for_just_before_the_supervisors_death_is_a_stop(lab: Lab, job: Path, kind: str) -> None:
    resumes = ("--set", "program.resumes=true")
    run, _ = trains(lab, job, 0.3, 3) if kind == "engine" else started(lab, job, kind, *resumes)
    run.stop.touch()
    kill_supervisor(lab, run)
    assert until_ended(run, 120).state == "stopped" and [end.action for end in history(run)] == ["done"], history(run)
