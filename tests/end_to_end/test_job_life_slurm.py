"""Sweeps, dependencies and the mail at a run's end on a real Slurm, whose mail program writes into a file."""

from collections.abc import Iterator
from pathlib import Path

import pytest
from rendering import executable
from slurm_jobs import command, light, submit
from slurm_lab.cluster import Cluster, wait_until
from slurm_lab.lab import Lab
from slurm_lab.why_not import why_not

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import verdict

pytestmark = pytest.mark.timeout(600)
ONE = ("job.nodes=1", "job.ranks_per_node=1", "parallel.zero=0")
SWEEP = ("sweep.grid.train.seed=[1, 2, 3, 4]", "sweep.simultaneous=2")


@pytest.fixture(scope="module")
def mailing(tmp_path_factory: pytest.TempPathFactory) -> Iterator[tuple[Lab, Path]]:
    """A Slurm, and the file with a line for each mail that it sends."""
    reason = why_not()
    if reason:
        pytest.skip(reason)
    folder = tmp_path_factory.mktemp("mail")
    folder.chmod(0o777)
    program = executable(folder / "mail", f'#!/bin/sh\necho "$@" >> {folder}/mails\n')
    with Lab(overrides={"KillWait": "2", "MailProg": str(program)}, keep=[folder]) as running:
        yield running, folder / "mails"


@pytest.fixture(scope="module")
def lab(mailing: tuple[Lab, Path]) -> Lab:
    return mailing[0]


def runs(job: Path) -> list[RunDirectory]:
    return [RunDirectory(path) for path in sorted(job.parent.glob("runs/*/[0-9]*"))]


def said(lab: Cluster, *words: str | Path) -> str:
    done = command(lab, *words)
    return done.stdout + done.stderr


def test_never_more_runs_at_once_than_the_sweep_allows(lab: Lab, job: Path) -> None:
    """On four idle nodes; then one run of another sweep is cancelled, and the whole of it."""
    times = job.parent / "times"
    two = f"until [ $(grep -c +1 '{times}') -ge 2 ]; do sleep 0.1; done"  # the first waits for the second, however late it starts
    submit(lab, job, (*ONE, *SWEEP, light(job, f"echo +1 >> '{times}'; {two}; sleep 3; echo -1 >> '{times}'")))
    wait_until(lambda: len(runs(job)) == 4 and all(map(verdict, runs(job))), "all have ended", 240)
    at_once = [sum(int(line) for line in times.read_text().split()[:end + 1]) for end in range(8)]
    assert max(at_once) == 2 and at_once[-1] == 0, at_once

    _, job_id = submit(lab, job, (*ONE, *SWEEP, light(job, "sleep 600")))
    array, second = job_id.partition("_")[0], runs(job)[4:]
    wait_until(lambda: said(lab, "status", array).count("running") == 2, "two run", 120)
    words = said(lab, "cancel", f"{array}_3")
    assert "stopped" in words and "the other runs of the sweep continue" in words
    said(lab, "cancel", second[0].path, "--all", "--now")
    wait_until(lambda: lab.run(["squeue", "--noheader"]).stdout.strip() == "", "the queue is empty", 60)
    assert "running" not in said(lab, "status", second[0].path.parent)


def test_a_job_starts_when_the_run_that_it_depends_on_has_completed(lab: Lab, job: Path) -> None:
    order, go = job.parent / "order", job.parent / "go"
    waits = f"until [ -e '{go}' ]; do sleep 0.1; done; echo first >> '{order}'"
    first, first_id = submit(lab, job, (*ONE, "job.name=first", light(job, waits)))
    rank = light(job, f"echo second >> '{order}'", "other")
    second, _ = submit(lab, job, (*ONE, "job.name=second", 'slurm.depends=["runs/first"]', rank))
    assert f"#SBATCH --dependency=afterok:{first_id}\n" in second.script.read_text()
    assert "Dependency" in said(lab, "status", second.path)
    go.touch()
    wait_until(lambda: verdict(second) is not None, "the verdict", 180)
    assert order.read_text() == "first\nsecond\n" and verdict(first) is not None


def test_a_dependency_that_can_never_be_satisfied_is_explained(lab: Lab, job: Path) -> None:
    """The run before it is stopped by its user: it has not completed."""
    first, _ = submit(lab, job, (*ONE, "job.name=first", light(job, "sleep 600")))
    second, second_id = submit(lab, job, (*ONE, "job.name=second", 'slurm.depends=["runs/first"]'))
    wait_until(lambda: "running" in said(lab, "status", first.path), "it runs", 120)
    said(lab, "cancel", first.path, "--now")
    wait_until(lambda: "DependencyNeverSatisfied" in said(lab, "status", second.path), "Slurm says it", 60)
    assert "so it never starts" in said(lab, "status", second.path)
    lab.run(["scancel", second_id])
    wait_until(lambda: "stopped" in said(lab, "status", first.path), "status says it", 60)
    assert "can never be satisfied: the run has stopped" in said(
        lab, "launch", job, "--on", "slurm", "--set", 'slurm.depends=["runs/first"]')


@pytest.mark.parametrize(("ends", "words"), [("true", "Ended"), ("exit 3", "Failed")])
def test_one_mail_at_the_end_of_a_run(lab: Lab, mailing: tuple[Lab, Path], job: Path, ends: str, words: str) -> None:
    """Of a run that is queued again once: none at that, and one that says how it ended."""
    _, mails = mailing
    mails.write_text("")
    mails.chmod(0o666)
    once = f"'{job.parent}/once'"
    rank = light(job, f"[ -e {once} ] || {{ touch {once}; exit 75; }}; {ends}")
    run, job_id = submit(lab, job, (*ONE, "notify.mail=me@example.org", rank))
    wait_until(lambda: verdict(run) is not None, "the verdict", 180)
    wait_until(lambda: lab.run(["squeue", "--noheader"]).stdout.strip() == "" and mails.read_text() != "", "a mail came", 60)
    assert run.attempt() == 2, "it was queued again"
    assert len(sent := mails.read_text().splitlines()) == 1, sent
    assert f"Job_id={job_id}" in sent[0] and words in sent[0] and sent[0].rstrip().endswith("me@example.org"), sent
