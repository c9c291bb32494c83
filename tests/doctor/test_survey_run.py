"""A whole survey through something that looks like srun: agents of this machine, a node that cannot be reached, an interrupt."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

import pytest
from launching import python_program

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.doctor.survey import run as module
from hpc_mp.doctor.survey.procedure import SurveyState
from hpc_mp.doctor.survey.start import AgentStart, SurveyRequest

SRUN = (Path(__file__).parent / "programs" / "srun").read_text(encoding="utf-8")


@pytest.fixture
def environ(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    python_program(tmp_path / "srun", SRUN)
    monkeypatch.setenv("PATH", f"{tmp_path}:{os.environ['PATH']}")
    monkeypatch.setattr(module, "plan", lambda wish, environ: AgentStart(wish, False, environ, {}))
    return dict(os.environ)


def interrupted(
    nodes: tuple[str, ...], environ: Mapping[str, str], at: str, interface: str = "lo",
) -> tuple[module.Report, list[str]]:
    """A survey that is interrupted at a step: its report, and all steps."""
    steps: list[str] = []

    def show(step: str, state: SurveyState | None) -> None:
        steps.append(step)
        if step == at:
            raise KeyboardInterrupt

    return module.run(SurveyRequest(nodelist=nodes, interfaces=(interface,)), show, environ), steps


@pytest.mark.parametrize(("sinfo", "words"), [
    ("n1|idle|none\nn2|down*|Not responding\nn4|drained|a bad fan", ": n2 is down* (Not responding), n4 is drained (a bad fan)"),
    ("n1|idle|none\nn2|allocated|none", ""),
])
def test_a_survey_that_waits_names_the_nodes_that_are_out(
    sinfo: str, words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch,
) -> None:
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
