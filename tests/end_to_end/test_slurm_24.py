"""The core of the Slurm tests on Slurm 24.11: the same tests as on 22.05, in a lab that lives in a newer Debian."""

import json
import os
import re
import subprocess
from collections.abc import Iterator
from pathlib import Path

import pytest
from recorded import LINES, RECORDED, SHOWN, answers, play
from rendering import CONF, FORMS, golden
from slurm_jobs import EIGHT, close, emulated, hpc_mp, launch, losses, steps
from slurm_lab.chroot import built, clients, why_not_built
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not
from test_slurm_training import (  # noqa: F401 (pytest finds the tests and fixtures of other files here)
    LONG,
    stop_and_compare,
    test_a_lost_node_is_replaced_by_the_spare,
    test_a_rank_that_raises_ends_the_job_soon_and_says_so_last,
    test_a_sweep_is_three_jobs,
    test_an_ordinary_user_gets_the_same_numbers,
    test_every_form_of_start_gives_the_same_numbers,
    test_the_environment_of_the_job_is_what_the_script_says,
    test_twenty_requeues_with_exclusion_hold_no_job,
)
from test_verbs_slurm import *  # noqa: F403 (all of its tests, and the fixture `run`)

from hpc_mp.cluster.slurm.jobs import parse_lines, parse_scontrol

pytestmark = [pytest.mark.prove, pytest.mark.timeout(1800)]

NEW = (24, 11)


@pytest.fixture(scope="module")
def trixie() -> Path:
    """The system with Slurm 24.11; skipped, in a sentence, where it cannot be."""
    reason = why_not() or why_not_built()
    if reason:
        pytest.skip(reason)
    try:
        return built()
    except subprocess.CalledProcessError:
        pytest.skip("debootstrap could not make a Debian trixie for the newer Slurm: it needs a mirror of Debian")


@pytest.fixture(scope="module")
def lab24(trixie: Path) -> Iterator[Lab]:
    with Lab(chroot=trixie, patience=120) as running:
        assert running.run(["sinfo", "--version"]).stdout.startswith("slurm-wlm 24.11")
        yield running


@pytest.fixture
def lab(lab24: Lab, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """What the tests of training run on; each with a ledger of bad nodes of its own, for there is but one spare."""
    monkeypatch.setenv("XDG_STATE_HOME", str(lab24.share / f"state {os.urandom(2).hex()}"))
    return lab24


@pytest.fixture
def cluster(lab24: Lab, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Lab:
    """What the tests of status, logs, cancel and the queue run on: their process finds the programs of 24.11 on its PATH."""
    programs = tmp_path / "24.11"
    programs.mkdir()
    monkeypatch.setenv("PATH", str(clients(lab24, programs)), prepend=os.pathsep)
    monkeypatch.setenv("SLURM_CONF", lab24.environ["SLURM_CONF"])
    assert subprocess.run(["squeue", "--version"], capture_output=True, text=True).stdout.startswith("slurm-wlm 24.11")
    return lab24


# --- scripts ----------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def big24(trixie: Path) -> Iterator[Lab]:
    with Lab(2, overrides=CONF, chroot=trixie, patience=120) as running:
        running.run(["scontrol", "create", "reservation=monday-9", "starttime=now", "duration=60", "nodes=a[5-6]", "users=root",
                     "flags=ignore_jobs"], check=True)
        yield running


@pytest.mark.parametrize("name", FORMS)
def test_golden_scripts_are_accepted(big24: Lab, name: str) -> None:
    said = big24.run(["sbatch", "--test-only", str(golden(name, NEW))])
    assert said.returncode == 0, said.stderr


@pytest.mark.parametrize(("right", "wrong", "words"), [
    ("h100:8", "h200:8", "Requested node configuration is not available"),
    ("--nodes=", "--knots=", "unrecognized option")])
def test_a_wrong_script_is_not(big24: Lab, right: str, wrong: str, words: str) -> None:
    script = golden("gpus-per-node", NEW).read_text(encoding="utf-8")
    assert right in script
    said = big24.run(["sbatch", "--test-only"], input=script.replace(right, wrong))
    assert said.returncode != 0 and words in said.stderr


# --- training ---------------------------------------------------------------------------------------------------------


def test_eight_ranks_on_four_hosts_are_the_emulator(lab: Cluster, job: Path) -> None:
    ended = launch(lab, job, EIGHT, timeout=600)
    assert ended["state"] == "completed"
    script = (Path(ended["run"]) / "job.sbatch").read_text(encoding="utf-8")
    assert "--oom-kill-step=1" in script, "it is not the script for this release"
    assert close(losses(ended["run"]), emulated(job, EIGHT))
    status = json.loads(lab.run(hpc_mp("status", ended["run"], "--json"), timeout=120, check=True).stdout)
    assert (status["state"], status["job"]["state"], status["job"]["exit_code"]) == ("completed", "COMPLETED", 0)


def test_usr2_saves_requeues_once_and_changes_no_number(lab: Cluster, job: Path) -> None:
    assert stop_and_compare(lab, job, LONG, emulated(job, LONG), lambda found: steps(found) >= 10) == 2


# --- the queue --------------------------------------------------------------------------------------------------------


def test_answers_are_those_that_were_recorded(lab: Cluster) -> None:
    try:
        ids = play(lab)
        now = answers(lab)
    finally:
        lab.mend()
    # Jobs of other tests may be there too: an array of theirs leaves a record behind that the two forms call differently.
    ours = set(map(str, ids.values()))
    lines, shown = ({job.id: job for job in jobs if re.split(r"[_+]", job.id)[0] in ours}
                    for jobs in (parse_lines(now[LINES]), parse_scontrol(now[SHOWN])))
    assert len(lines) > 5 and lines == shown
    named = re.compile(r"JobName=(.*?) JobState=(\S+)")
    assert {*named.findall(now[SHOWN])} >= {*named.findall((RECORDED / SHOWN).read_text(encoding="utf-8"))}
