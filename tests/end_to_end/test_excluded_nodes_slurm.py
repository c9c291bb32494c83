"""Nodes that are lost, excluded, suspected or renamed: the job starts again whenever enough are up, though nobody looks.

Every sequence prints how long after the moment when enough nodes were up Slurm ran the job, and how long after it a step was
trained.
"""

import re
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest
from slurm_jobs import command, light, own_ledger, steps, submit, until, write_job
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab

from hpc_mp.cluster.bad_nodes import BadNode, Certainty, ledger, read_exclusions, record
from hpc_mp.rundir import RunDirectory, read_attempt, read_lines

pytestmark = [pytest.mark.timeout(1200), pytest.mark.prove]

THREE = ("job.nodes=3", "job.ranks_per_node=1", "train.global_batch=24", "train.steps=20000", "checkpoint.every=100",
         "job.heartbeat_timeout=10", "slurm.retries=3")
SOON_S = 60  # from the moment when enough nodes are up to the job's start
FIRST_STEP_S = 120  # and to a step: on few processors Python takes its time


@pytest.fixture
def job(lab: Cluster) -> Iterator[Path]:
    with job_in(lab) as path:
        yield path


@contextmanager
def job_in(lab: Cluster) -> Iterator[Path]:
    """A job file on a lab; its jobs end with it, and what they and their watches have said is shown."""
    directory = lab.share / f"excluded {time.time_ns() % 10**6}"
    try:
        yield write_job(directory)
    finally:
        for run in directory.glob("runs/*/[0-9]*"):
            lab.run(["scancel", *(name.read_text().strip() for name in (run / "job.id", run / "watch.id") if name.exists())])
            print(*(f"{name}: {name.read_text()}" for name in (run / "watch.log", *run.glob("slurm-*.log")) if name.exists()))
        lab.mend()
        shutil.rmtree(directory, ignore_errors=True)


def know(lab: Cluster, job: Path, nodes: str, sure: Certainty = "likely") -> None:
    """Have these nodes in the ledger, the first one longest."""
    now = time.time()
    record(ledger(f"lab{lab.number}", own_ledger(job)), [
        BadNode(node, "lost", f"{node} vanished", "run", now - 60 + number, now + 3600, sure)
        for number, node in enumerate(nodes.split())])


def hosts(run: RunDirectory) -> list[str]:
    """Return the hosts of the newest start."""
    return list(read_attempt(run.attempt_record).hosts)


def attempt(run: RunDirectory) -> int:
    return read_attempt(run.attempt_record).attempt if run.attempt_record.exists() else 0


def left_out(lab: Cluster, job_id: str) -> str:
    return lab.job(int(job_id))["ExcNodeList"]


def waits(lab: Cluster, job_id: str) -> bool:
    return lab.job(int(job_id))["JobState"] == "PENDING"


@contextmanager
def starts_again(lab: Cluster, run: RunDirectory, job_id: str, what: str, trains: bool = True) -> Iterator[None]:
    """What happens while this is entered leaves the job with enough nodes at its end: it starts again within ``SOON_S`` of that
    moment. A job whose ranks train trains again, too."""
    before = attempt(run)
    starts = int(lab.job(int(job_id))["Restarts"]) - waits(lab, job_id)  # Slurm counts a start when it queues the job again

    def runs() -> bool:
        job = lab.job(int(job_id))
        return job["JobState"] == "RUNNING" and (int(job["Restarts"]) > starts or not before)

    yield
    running = until(runs, f"{what}: the job runs again", SOON_S)
    said = f"runs after {running:.0f} s"
    if trains:
        step = running + until(lambda: any(line["attempt"] > before for line in read_lines(run.metrics)[-3:]),
                               f"{what}: a step of the next start", FIRST_STEP_S - running)
        said += f", trains after {step:.0f} s"
    else:
        until(lambda: attempt(run) > before, "the next start", SOON_S)
    print(f"\nMEASURED {what}: {said}, on {' '.join(hosts(run))}")


def test_a_second_node_is_lost_when_the_first_is_back_and_the_job_waits(lab: Cluster, job: Path) -> None:
    run, job_id = submit(lab, job, THREE)
    until(lambda: steps(run) >= 12, "some steps")
    _, second, third = hosts(run)
    lab.kill(second)
    until(lambda: read_exclusions(run.excluded) and waits(lab, job_id), "the job queued again")
    with starts_again(lab, run, job_id, "a second node is lost when the first is back and the job waits"):
        time.sleep(10)
        lab.boot(second)
        lab.kill(third)
    assert second in hosts(run) and third not in hosts(run)

    # And in turn: the other comes back, and the job's first node dies, with all that we have running.
    first = hosts(run)[0]
    with starts_again(lab, run, job_id, "then the other comes back and the first node dies"):
        lab.boot(third)
        lab.kill(first)
    assert first not in hosts(run)


def test_a_second_node_is_drained_while_the_job_waits_without_the_first(lab: Cluster, job: Path) -> None:
    """No process of the run is left that could take the first one back when it comes, but the watch."""
    run, job_id = submit(lab, job, THREE)
    until(lambda: steps(run) >= 12, "some steps")
    _, second, third = hosts(run)
    lab.kill(second)
    until(lambda: read_exclusions(run.excluded) and waits(lab, job_id), "the job queued again")
    lab.run(["scontrol", "update", f"NodeName={third}", "State=DRAIN", "Reason=by its administrator"], check=True)
    time.sleep(20)
    assert waits(lab, job_id) and left_out(lab, job_id) == second
    with starts_again(lab, run, job_id, "a second node is drained while the job waits, and the first comes back"):
        lab.boot(second)
    assert second in hosts(run) and third not in hosts(run)


def test_two_nodes_are_lost_and_come_back_in_turn(lab: Cluster, job: Path) -> None:
    """While both are away too few are left; then each time one is lost the one that was lost before is needed again."""
    run, job_id = submit(lab, job, THREE)
    until(lambda: steps(run) >= 12, "some steps")
    with starts_again(lab, run, job_id, "n2 and n3 are lost, n2 comes back"):
        lab.kill("n2")
        lab.kill("n3")
        until(lambda: waits(lab, job_id) and lab.idle() == 2, "two nodes left")
        time.sleep(10)
        lab.boot("n2")
    assert {*hosts(run)} == {"n1", "n2", "n4"}
    for back, lost, left in (("n3", "n4", {"n1", "n2", "n3"}), ("n4", "n2", {"n1", "n3", "n4"})):
        with starts_again(lab, run, job_id, f"{back} comes back, {lost} is lost"):
            lab.boot(back)
            until(lambda: lab.idle() == 1, f"{back} back")
            lab.kill(lost)
        assert {*hosts(run)} == left


def test_all_nodes_are_in_the_ledger(lab: Cluster, job: Path) -> None:
    """The job starts with the least certain and oldest ones, and gets the last one when it is needed."""
    know(lab, job, "n4", "certain")
    know(lab, job, "n1 n2 n3")
    run, job_id = submit(lab, job, THREE)
    with starts_again(lab, run, job_id, "all nodes are in the ledger"):
        pass
    assert {*hosts(run)} == {"n1", "n2", "n3"} and left_out(lab, job_id) == "n4"
    with starts_again(lab, run, job_id, "all nodes are in the ledger, and one is lost"):
        lab.kill("n2")
    assert {*hosts(run)} == {"n1", "n3", "n4"}


def test_a_node_is_down_when_all_are_in_the_ledger(lab: Cluster, job: Path) -> None:
    lab.kill("n1")
    until(lambda: lab.idle() == 3, "a node down", 60)
    know(lab, job, "n1 n2 n3 n4")
    run, job_id = submit(lab, job, (*THREE[:3], light(job, "sleep 300")))
    with starts_again(lab, run, job_id, "all nodes are in the ledger, and one is down", trains=False):
        pass
    assert hosts(run) == ["n2", "n3", "n4"]


def test_a_ledger_full_of_suspicions_keeps_no_job_waiting(lab: Cluster, job: Path) -> None:
    know(lab, job, "n1 n2 n3 n4", "suspected")
    run, job_id = submit(lab, job, ("job.nodes=4", "job.ranks_per_node=1", "train.global_batch=24", light(job, "sleep 300")))
    with starts_again(lab, run, job_id, "a ledger full of suspicions", trains=False):
        pass
    assert left_out(lab, job_id) == "(null)" and not run.watch_id.exists()


def test_the_first_node_dies_while_a_node_of_the_ledger_is_left_out(lab: Cluster, job: Path) -> None:
    """No process of the run is left then, and what remains is one node too few."""
    know(lab, job, "n3")
    run, job_id = submit(lab, job, (*THREE[:3], light(job, "sleep 600")))
    until(lambda: run.attempt_record.exists() and run.watch_id.exists(), "the start")
    assert hosts(run) == ["n1", "n2", "n4"] and left_out(lab, job_id) == "n3"
    shown = command(lab, "status", run.path).stdout
    assert "n3, excluded by hpc-mp since" in next(line for line in shown.splitlines() if line.startswith("without")), shown
    time.sleep(5)
    with starts_again(lab, run, job_id, "the first node dies while n3 is left out", trains=False):
        lab.kill("n1")
    assert hosts(run) == ["n2", "n3", "n4"] and not read_exclusions(run.excluded)


def test_an_exclusion_by_the_user_stays_beside_ours(lab: Cluster, job: Path) -> None:
    """Two nodes are needed, the user excludes n1, n3 is in the ledger; n2 goes while the job waits: n3 is taken,
    and n1 is not."""
    know(lab, job, "n3")
    later = ("job.nodes=2", "job.ranks_per_node=1", 'slurm.extra.begin="now+20"', light(job, "sleep 300"))
    run, job_id = submit(lab, job, (*later, 'slurm.extra.exclude="n1"'))
    assert left_out(lab, job_id) == "n[1,3]" and waits(lab, job_id)
    with starts_again(lab, run, job_id, "the user excludes n1, we n3, and n2 is lost", trains=False):
        lab.kill("n2")
    assert hosts(run) == ["n3", "n4"] and left_out(lab, job_id) == "n1"


class HoldingLab(Lab):
    """One whose Slurm holds a job that was queued again back as long as by default: the life of a credential and a second."""

    def files(self) -> dict[str, str]:
        found = super().files()
        return found | {"slurm.conf": found["slurm.conf"].replace(",cred_expire=5", "")}


def test_slurms_hold_is_cut_short() -> None:
    """By the supervisor when another node is lost; by the watch when the first one is, and with it all else of ours."""
    with HoldingLab(5, overrides={"KillWait": "2"}) as lab, job_in(lab) as job:
        added = command(lab, "cluster", "nodes", "--add", "n5", "--because", "a test", user="nobody", environ=own_ledger(job))
        assert added.returncode == 0, added.stderr
        run, job_id = submit(lab, job, (*THREE[:3], light(job, "sleep 600")), user="nobody")
        until(lambda: run.attempt_record.exists(), "the start")
        with starts_again(lab, run, job_id, "two minutes of hold, a node is lost", trains=False):
            lab.kill("n2")
        assert hosts(run) == ["n1", "n3", "n4"] and left_out(lab, job_id) in ("n5", "n[5,2]")
        time.sleep(5)
        with starts_again(lab, run, job_id, "two minutes of hold, the first node is lost", trains=False):
            lab.kill("n1")
        assert hosts(run) == ["n3", "n4", "n5"]


def test_nodes_are_renamed() -> None:
    """Slurm refuses a list with a name that it does not know. One is in the ledger before the launch; two more, excluded by the
    user and by us, go while the job runs. Then a node is lost, and the last one of ours is needed."""
    with Lab(6, overrides={"KillWait": "2"}) as lab, job_in(lab) as job:
        know(lab, job, "n9", "certain")
        know(lab, job, "n4 n6")
        run, job_id = submit(lab, job, (*THREE[:3], 'slurm.extra.exclude="n5"', light(job, "sleep 600")))
        until(lambda: run.attempt_record.exists() and run.watch_id.exists(), "the start")
        assert hosts(run) == ["n1", "n2", "n3"] and left_out(lab, job_id) == "n[4-6]"
        rename(lab, "n5", "n6")
        with starts_again(lab, run, job_id, "excluded nodes are renamed, and one is lost", trains=False):
            lab.kill("n2")
        assert hosts(run) == ["n1", "n3", "n4"]


def rename(lab: Lab, *nodes: str) -> None:
    """Slurm's configuration, read anew by its controller, does not know these names any more."""
    lab.run(["scontrol", "shutdown", "slurmctld"], check=True)
    until(lambda: not (lab.directory / "state" / "slurmctld.pid").exists(), "the controller's end")
    for node in nodes:
        lab.kill(node)
    text = lab.conf.read_text()
    lab.conf.write_text("".join(line for line in text.splitlines(True) if not re.match(rf"NodeName=({'|'.join(nodes)}) ", line)))
    topology = lab.conf.with_name("topology.conf")
    left = tuple(node for node in lab.nodes if node not in nodes)
    topology.write_text(f"SwitchName=s1 Nodes={','.join(left)}\n")
    lab.nodes = left
    lab.popen(["slurmctld", "-D"])
    until(lambda: lab.run(["scontrol", "ping"]).stdout.count("UP"), "the controller is back", 30)
    until(lambda: lab.run(["sinfo", "--noheader", "--Node", "--format=%N"]).stdout.split() == [*left], "the new names", 30)
