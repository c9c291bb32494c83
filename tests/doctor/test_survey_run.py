"""How srun starts agents; a whole survey through something like srun: a node that cannot be reached, an interrupt."""

import os
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
from launching import python_program

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.doctor.survey import run as module
from hpc_mp.doctor.survey.run import SurveyState
from hpc_mp.doctor.survey.start import AGENT, AgentStart, SurveyRequest, plan, without

SRUN = (Path(__file__).parent / "programs" / "srun").read_text(encoding="utf-8")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    python_program(tmp_path / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "plan", lambda wish, environ: AgentStart(wish, False, environ, {}))
    return dict(os.environ)


def interrupted(nodes: tuple[str, ...], environ: Mapping[str, str], at: str,
                interface: str = "lo") -> tuple[module.Report, list[str]]:
    """A survey that is interrupted at a step: its report, and all steps."""
    steps: list[str] = []

    def show(step: str, state: SurveyState | None) -> None:
        steps.append(step)
        if step == at:
            raise KeyboardInterrupt

    return module.run(SurveyRequest(nodelist=nodes, interfaces=(interface,)), show, environ), steps


@pytest.mark.parametrize(("sinfo", "words"), [
    ("n1|idle|none\nn2|down*|Not responding\nn4|drained|a bad fan", ": n2 is down* (Not responding), n4 is drained (a bad fan)"),
    ("n1|idle|none\nn2|allocated|none", "")])
def test_a_survey_that_waits_names_the_nodes_that_are_out(sinfo: str, words: str, tmp_path: Path,
                                                          monkeypatch: pytest.MonkeyPatch) -> None:
    """srun queues until sinfo was asked, and starts nobody: what was shown by then."""
    notice, asked = "srun: job 5 queued and waiting for resources", tmp_path / "asked"
    python_program(tmp_path / "srun", (
        f"import pathlib, sys, time\nprint({notice!r}, file=sys.stderr, flush=True)\n"
        f"while not pathlib.Path({str(asked)!r}).exists():\n    time.sleep(0.05)\n"))
    python_program(tmp_path / "sinfo", f"import pathlib\npathlib.Path({str(asked)!r}).touch()\nprint({sinfo!r})\n")
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "plan", lambda wish, environ: AgentStart(wish, False, environ, {}))
    steps: list[str] = []
    with pytest.raises(RunFailed):
        module.run(SurveyRequest(nodes=2), lambda step, _: steps.append(step), dict(os.environ))
    assert f"{notice}{words}" in steps and {step for step in steps if step.startswith("srun")} == {f"{notice}{words}"}


def test_an_interrupt_gives_what_is_known_by_then(environ: dict[str, str]) -> None:
    report, steps = interrupted(("n1", "n2"), environ, "probed")
    assert not report.complete and report.verdict is None and report.cluster == "paper" and steps[-1] == "interrupted"
    assert report.evidence.nodes == ("n1", "n2") and report.evidence.leaves == {"n1": "s1", "n2": "s1"}
    assert report.evidence.trials and report.evidence.echoes and not report.evidence.legs
    assert report.document()["complete"] is False


def test_a_node_that_srun_cannot_reach_is_down_and_the_others_are_surveyed(environ: dict[str, str]) -> None:
    report, _ = interrupted(("n1", "n2", "n3"), environ, "1 rounds of pairs measured")
    assert report.evidence.nodes == ("n1", "n2") and len(report.evidence.legs) == 2
    (found,) = [found for found in report.diagnoses if found.code == "node-down"]
    assert found.members == ("n3",) and found.certain and "Communication connection failure" in found.evidence


def test_a_node_that_tears_srun_down_with_it_is_down_and_the_others_are_surveyed(environ: dict[str, str]) -> None:
    """Slurm ends the whole step when a connection to one of its nodes is reset."""
    wish = SurveyRequest(nodelist=("n1", "n2"), interfaces=("lo",))
    report = module.run(wish, lambda step, state: None, environ | {"TEARS": "1"})
    assert report.complete and report.evidence.nodes == ("n1",)
    assert [(found.code, found.members) for found in report.diagnoses] == [("node-down", ("n2",))]


def test_no_agent_at_all(environ: dict[str, str]) -> None:
    with pytest.raises(RunFailed, match=r"no agent could be started.*\nn3: Slurm cannot start a task on it"):
        interrupted(("n3",), environ, "probed")
    with pytest.raises(HpcMpError, match="no interface ib7"):
        interrupted(("n1", "n2"), environ, "probed", interface="ib7")


INSIDE = {"SLURM_JOB_ID": "7", "SLURM_JOB_NODELIST": "n[1-4]", "SLURM_NTASKS": "32", "SLURM_CPUS_PER_TASK": "4", "PATH": "/bin"}


def slurm(answers: Mapping[str, str]):  # type: ignore[no-untyped-def]
    def ask(argv: Sequence[str]) -> str:
        if argv[0] not in answers:
            raise CommandFailed(f"{argv[0]} is not on PATH")
        return answers[argv[0]]
    return ask


UP = {"scontrol": "Slurmctld(primary) at ctl is UP", "squeue": "RUNNING\n", "sinfo": "n1|idle|none\nn2|idle|none\n"}


def test_a_small_job_of_its_own() -> None:
    request = SurveyRequest(nodes=8, partition="gpu", interfaces=("ib0", "ib1"), options=("--account=x",))
    start = plan(request, {"PATH": "/bin"}, slurm({**UP, "sinfo": "".join(f"n{n}|idle|none\n" for n in range(8))}))
    words = start.command
    assert words[0] == "srun" and words[-5:] == [sys.executable, "-m", AGENT, "ib0", "ib1"]
    assert {"--nodes=8", "--ntasks=8", "--ntasks-per-node=1", "--partition=gpu", "--exclusive", "--account=x"} <= {*words}
    assert not start.inside and not any(word.startswith(("--overlap", "--nodelist", "--exclude")) for word in words)


def test_a_step_of_the_allocation_has_none_of_its_shape() -> None:
    start = plan(SurveyRequest(), INSIDE, slurm(UP))
    assert start.inside and {"--overlap", "--nodes=4", "--nodelist=n[1-4]"} <= {*start.command}
    assert "--exclusive" not in start.command
    assert start.environ["SLURM_JOB_ID"] == "7" and not {"SLURM_NTASKS", "SLURM_CPUS_PER_TASK"} & start.environ.keys()
    assert "--nodelist=n[1-2]" in plan(SurveyRequest(nodes=2), INSIDE, slurm(UP)).command


@pytest.mark.parametrize(("request_", "environ", "rule"), [
    (SurveyRequest(nodes=3), {}, "this cluster has 2 nodes"),
    (SurveyRequest(nodes=3, partition="gpu"), {}, "partition gpu has 2 nodes"),
    (SurveyRequest(nodes=2, nodelist=("n1", "n2", "n3")), {}, "--nodelist names 3 nodes"),
    (SurveyRequest(nodes=5), INSIDE, "the allocation has 4 nodes")])
def test_a_number_of_nodes_that_cannot_be_had_is_refused(request_: SurveyRequest, environ: dict[str, str], rule: str) -> None:
    """Slurm would let the job wait without a word."""
    with pytest.raises(HpcMpError, match=rule):
        plan(request_, environ, slurm(UP))
    assert plan(SurveyRequest(nodes=2), environ, slurm(UP)).count == 2


def test_names_that_there_are_not_are_refused() -> None:
    """Slurm would say that a step's configuration is not available, or that a partition is invalid."""
    known = slurm({**UP, "sinfo": "n1|idle|none\n", "scontrol": "Slurmctld(primary) at ctl is UP"})

    def ask(argv: Sequence[str]) -> str:
        if argv[:3] == ("scontrol", "show", "node"):
            raise CommandFailed("Node n9 not found")
        return "" if "--partition=gqu" in argv else known(argv)

    with pytest.raises(HpcMpError, match=r"--nodelist n\[8-9\]: are no nodes of this cluster"):
        plan(SurveyRequest(nodelist=("n1", "n8", "n9")), {}, ask)
    with pytest.raises(HpcMpError, match="--partition gqu: is no partition"):
        plan(SurveyRequest(nodes=1, partition="gqu"), {}, ask)
    assert plan(SurveyRequest(nodelist=("n1",), partition="gpu"), {}, ask).count == 1


def test_a_dead_allocation_is_none() -> None:
    dead = slurm({**UP, "squeue": ""})
    start = plan(SurveyRequest(nodelist=("n1", "n2")), INSIDE, dead)
    assert not start.inside and "SLURM_JOB_ID" not in start.environ
    with pytest.raises(HpcMpError, match="--nodelist"):
        plan(SurveyRequest(), INSIDE, dead)


def test_nodes_that_slurm_would_let_us_wait_for_are_left_out() -> None:
    told = "n1|idle|none\nn2|down*|Not responding\nn3|drained|bad fan | really\nn4|mixed|none\n"
    start = plan(SurveyRequest(nodelist=("n1", "n2", "n3", "n4")), {}, slurm({**UP, "sinfo": told}))
    assert start.absent == {"n2": "Slurm calls it down* (Not responding)", "n3": "Slurm calls it drained (bad fan | really)"}
    assert {"--nodes=2", "--nodelist=n1,n4"} <= {*start.command} or {"--nodes=2", "--nodelist=n[1,4]"} <= {*start.command}


@pytest.mark.parametrize("wish", [SurveyRequest(nodelist=("n1", "n2", "n3")), SurveyRequest(nodes=3)])
def test_nodes_that_srun_cannot_reach_are_left_out_the_next_time(wish: SurveyRequest) -> None:
    words = ["srun: error: Task launch for StepId=5.0 failed on node n3: Communication connection failure",
             "srun: error: Application launch failed: Communication connection failure"]
    fewer = without(AgentStart(wish, False, {}, {}), words)
    assert fewer is not None and fewer.absent == {"n3": "Slurm cannot start a task on it (Communication connection failure)"}
    assert "--nodes=2" in fewer.command and ("--nodelist=n[1-2]" in fewer.command or "--exclude=n3" in fewer.command)
    torn = ["srun: error: step_launch_notify_io_failure: aborting, io error with slurmstepd on node 1"]
    assert without(fewer, torn, ["n1", "n4"]).absent["n4"] == "its task ended before the step"  # type: ignore[union-attr]
    assert without(fewer, torn) is None
    assert without(fewer, ["srun: error: Unable to allocate resources: Invalid partition"]) is None


def test_no_slurm_is_said() -> None:
    with pytest.raises(HpcMpError, match="without Slurm: scontrol is not on PATH"):
        plan(SurveyRequest(nodes=2), {}, slurm({}))
    assert Path(sys.executable).is_absolute()
