"""The examples on a real Slurm: each by an ordinary user, and with a host that dies; one through every other disturbance."""

import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
from example_programs import EXAMPLES, LAUNCH, PATH, Example, assert_same, copy, installed, local, newest, steps
from lab_runs import GLOO, ON_SLURM, hpc_mp, until_ended
from slurm_jobs import until
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory, history, read_json
from hpc_mp.rundir.outcome import verdict
from hpc_mp.rundir.records import AWAITING

pytestmark = [pytest.mark.prove, pytest.mark.timeout(900)]


def on_slurm(lab: Lab, name: str) -> Example:
    example = installed(name)
    if example.needs == "mpi4py" and lab.run(["srun", "--mpi=pmix", "--ntasks=1", "true"]).returncode:
        pytest.skip("this Slurm has no PMIx plug-in")
    return example


def launch(lab: Lab, where: Path, *options: str, user: str | None = None) -> str:
    environ = {"PATH": PATH, "XDG_STATE_HOME": str(where.parent / "state"), "GLOO_SOCKET_IFNAME": "eth0"}
    done = lab.run([*LAUNCH, *ON_SLURM, *GLOO, *options], user=user, cwd=where, timeout=300, environ=environ)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def second_host(run: RunDirectory) -> str:
    return str(read_json(run.attempt_record)["hosts"][1])


@pytest.mark.parametrize("name", EXAMPLES)
def test_an_ordinary_user_runs_it_on_two_hosts(lab: Lab, here: Path, name: str) -> None:
    example, where = on_slurm(lab, name), copy(name, here)
    said = launch(lab, where, "--wait", user="nobody")
    assert example.summary in said, said
    assert steps(newest(where)) == list(example.steps)


@pytest.mark.parametrize("name", EXAMPLES)
def test_a_node_dies_and_the_job_goes_on_without_it(lab: Lab, here: Path, name: str) -> None:
    """Its parameters are those of a run on this machine that nothing has disturbed; of as few ranks as are on two hosts."""
    example, whole = on_slurm(lab, name), copy(name, here)
    few = ("--set", f"job.ranks_per_node={example.ranks // 2}")
    undisturbed = local(whole, *few)
    assert undisturbed.returncode == 0, undisturbed.stderr

    disturbed = copy(name, here, example.seconds)
    launch(lab, disturbed, *few)
    run = newest(disturbed)
    until(lambda: (run.path / example.first).exists() or verdict(run) is not None, "a checkpoint", 240)
    victim = second_host(run)
    lab.kill(victim)
    assert until_ended(run, 300).state == "completed" and run.attempt() == 2, run.main_log.read_text()
    assert victim not in read_json(run.attempt_record)["hosts"]
    assert steps(run)[-1] == example.steps[-1] and steps(run)[0] > example.steps[0]
    assert_same(example, newest(whole), run)


def sent(lab: Lab, run: RunDirectory, number: str) -> None:
    killed = lab.at(second_host(run), ["bash", "-c", f"kill -{number} $(pgrep -f '^python train.py' | tail -n 1)"])
    assert killed.returncode == 0, killed.stderr


def preempted(lab: Lab, run: RunDirectory) -> None:
    """A job of a better partition wants all nodes."""
    lab.run(["scontrol", "create", "PartitionName=better", "Nodes=ALL", "PriorityTier=10", "PreemptMode=OFF"], check=True)
    lab.sbatch("--partition=better", f"--nodes={len(lab.nodes)}", "--exclusive", "--wrap=sleep 5")


def dies(lab: Lab, run: RunDirectory) -> str:
    """Kill the second host, wait until the run waits for Slurm to notice it, and return its name."""
    lab.kill(dead := second_host(run))
    until(lambda: read_json(run.status)["phase"] == AWAITING, "the wait for Slurm", 200)
    return dead


def stays_dead(lab: Lab, run: RunDirectory) -> None:
    """Queued again at once, the job would never start."""
    dead = dies(lab, run)
    status = hpc_mp(lab, lab.share, "status", run.path)
    assert status.returncode == 0 and f"waiting for Slurm until it notices that {dead} is dead" in status.stdout, status


def comes_back(lab: Lab, run: RunDirectory) -> None:
    """Before Slurm has noticed: nobody tells srun that the node's tasks are gone."""
    dead = second_host(run)
    lab.kill(dead)
    time.sleep(20)
    lab.boot(dead)


def is_cancelled(lab: Lab, run: RunDirectory) -> None:
    dies(lab, run)
    done = hpc_mp(lab, lab.share, "cancel", run.path)
    assert done.returncode == 0, done.stdout + done.stderr


PREEMPTION = {"PreemptType": "preempt/partition_prio", "PreemptMode": "REQUEUE"}
# A Slurm that notices a dead node late, as on real sites: 300 s by default, 5 s in the lab of other tests.
LATE = {"SlurmdTimeout": "150", "MessageTimeout": "10", "ReturnToService": "1"}


@dataclass(frozen=True)
class Disturbance:
    """What happens to the run once it has saved.

    kind: of the first attempt's end. state: of the run, after so many attempts. delay: seconds added to each step.
    silence: program.silent_limit; where it is an hour, silence is no sign of a dead node.
    """

    happens: Callable[[Lab, RunDirectory], None]
    kind: str
    state: str = "completed"
    attempts: Sequence[int] = range(2, 10)
    slurm: Mapping[str, str] | None = None
    delay: float = 0.3
    silence: int = 25
    options: tuple[str, ...] = ()


DISTURBANCES = {
    "a link is cut": Disturbance(lambda lab, run: lab.link(second_host(run), up=False), "node"),
    "a rank is killed": Disturbance(lambda lab, run: sent(lab, run, "KILL"), "signal"),
    "a rank is stopped": Disturbance(lambda lab, run: sent(lab, run, "STOP"), "hang"),
    "the time is up": Disturbance(lambda lab, run: None, "stopped", delay=1.4, options=("--set", "job.time_limit=1")),
    "preemption": Disturbance(preempted, "stopped", slurm=PREEMPTION),
    "the node stays dead": Disturbance(stays_dead, "node", "completed", [2], LATE, silence=3600),
    "the node comes back": Disturbance(comes_back, "lost", "completed", [2], LATE, silence=3600),
    "the run is cancelled": Disturbance(is_cancelled, "node", "stopped", [1], LATE, silence=3600),
}


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> RunDirectory:
    whole = copy("torch-ddp", tmp_path_factory.mktemp("undisturbed"))
    done = local(whole)
    assert done.returncode == 0, done.stdout + done.stderr
    return newest(whole)


@pytest.mark.parametrize("name", DISTURBANCES)
def test_a_job_goes_on_after_what_is_no_fault_of_the_program(name: str, undisturbed: RunDirectory) -> None:
    """On two hosts with two ranks each; the parameters are those of a run that nothing has disturbed."""
    case = DISTURBANCES[name]
    with Lab(overrides={"KillWait": "2", **(case.slurm or {})}) as lab:
        example = copy("torch-ddp", lab.share, case.delay)
        launch(lab, example, "--set", f"program.silent_limit={case.silence}", *case.options)
        run = newest(example)
        until(lambda: (run.path / "model.pt").exists(), "a checkpoint", 200)
        first, second = read_json(run.attempt_record)["hosts"]
        case.happens(lab, run)
        state = until_ended(run, 500).state
        said = run.main_log.read_text() + run.history.read_text()
        assert state == case.state and run.attempt() in case.attempts, said
        end, blamed = history.history(run)[0], case.kind in ("node", "lost")
        assert end.kind == case.kind and (first in end.nodes, second in end.nodes) == (False, blamed), said
        if state == "completed":
            later = read_json(run.attempt_record)["hosts"]
            assert (second in later) != blamed, said
            assert "step 1 " not in run.node_log(later[0]).read_text(), "it began anew"
            assert_same(EXAMPLES["torch-ddp"], undisturbed, run)
