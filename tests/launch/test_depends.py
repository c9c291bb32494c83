"""``slurm.depends``: what runs and jobs become ``--dependency``, and which are refused."""

from __future__ import annotations

from pathlib import Path

import pytest
from launching import mark, record, the_run, write_job
from played_slurm import Cluster
from rendering import CPU, PYTHON, RUN, facts
from rendering import job as resolved

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import dump_job, load_job
from hpc_mp.launch.depends import dependencies
from hpc_mp.launch.render import render
from hpc_mp.rundir import RunDirectory, create_run, write_json
from hpc_mp.rundir.runs import record_successors

__all__ = ["mark"]  # a fixture


def made(folder: Path, job_id: str | None = None, state: str | None = None, chain: tuple[str, ...] = ()) -> RunDirectory:
    run = create_run(folder / "runs", "t")
    run.job.write_text(dump_job(load_job(write_job(folder))))
    write_json(run.placement, {})
    if job_id is not None:
        run.job_id.write_text(f"{job_id}\n")
    if chain:
        record_successors(run, [job_id or "", *chain])
    if state is not None:
        run.metrics.write_text(record(1) + "\n")
        write_json(run.outcome, {"attempt": 1, "state": state, "cause": None})
    return run


def asked(folder: Path, *words: str, **states: str) -> tuple[str | None, tuple[str, ...]]:
    """The option and the words, where Slurm says these states of jobs (``j7="RUNNING"``)."""
    path = write_job(folder)
    path.write_text(path.read_text() + f"[slurm]\ndepends = {list(words)}\n")

    def ask(argv: tuple[str, ...]) -> str:
        if argv[0] != "squeue":
            raise CommandFailed("Invalid job id specified")
        return "".join(f"{name[1:]}|{state}|N/A||0|0|None|\n" for name, state in states.items())

    found = dependencies(load_job(path), ask)  # type: ignore[arg-type]
    return found.option, found.words


def test_runs_and_jobs_that_go_on(tmp_path: Path) -> None:
    run = made(tmp_path, "7")
    option, words = asked(tmp_path, "runs/t", "afterany:8", "9_2", j7="RUNNING", j8="PENDING", j9_2="RUNNING")
    assert option == "afterok:7,afterany:8,afterok:9_2"
    assert words == (f"afterok: {run.path}, running as job 7", "afterany: job 8, PENDING", "afterok: job 9_2, RUNNING")


def test_a_chain_is_waited_for_by_whichever_job_completes_the_run(tmp_path: Path) -> None:
    made(tmp_path, "7", chain=("8", "9"))
    states = {"j7": "RUNNING", "j8": "PENDING", "j9": "PENDING"}
    assert asked(tmp_path, "runs/t", **states)[0] == "afterok:7?afterok:8?afterok:9"
    with pytest.raises(HpcMpError, match=r"slurm\.chain beside others, and Slurm joins"):
        asked(tmp_path, "runs/t", "12", j12="RUNNING", **states)


@pytest.mark.parametrize(("state", "word", "words"), [
    ("completed", "runs/t", "the run has completed, nothing to wait for"),
    ("failed", "afterany:runs/t", "the run has failed, nothing to wait for"),
    ("stopped", "afternotok:runs/t", "the run has stopped, nothing to wait for"),
])
def test_what_has_come_already_needs_no_wait(tmp_path: Path, state: str, word: str, words: str) -> None:
    made(tmp_path, "7", state)
    option, said = asked(tmp_path, word, "7", j7="COMPLETED")
    assert option is None and words in said[0] and said[1] == "7: job 7 has ended as COMPLETED, nothing to wait for"


@pytest.mark.parametrize(("state", "word", "words"), [
    ("failed", "runs/t", r"never be satisfied: the run has failed\. .*/0001/job\.toml --resume, or write \"afterany:"),
    ("completed", "afternotok:runs/t", r"can never be satisfied: the run has completed\. Leave it out"),
    (None, "runs/x", "does not exist"),
    (None, "99", "is a job that Slurm does not know"),
    (None, "8", "can never be satisfied: job 8 has ended as FAILED"),
    (None, "singleton", "must be a run or the id of a Slurm job"),
    (None, "aftercorr:8", "must be a run or the id of a Slurm job"),
    (None, "-x", "must be a run or the id of a Slurm job"),
])
def test_what_is_refused(tmp_path: Path, state: str | None, word: str, words: str) -> None:
    if state is not None:
        made(tmp_path, "7", state)
    with pytest.raises(HpcMpError, match=words):
        asked(tmp_path, word, j8="FAILED", **({} if state is None else {"j7": "COMPLETED"}))


def test_the_remedy_can_be_pasted(tmp_path: Path) -> None:
    directory = tmp_path / "a directory"
    made(directory, "7", "failed")
    with pytest.raises(HpcMpError, match=r"hpc-mp launch '/.*/a directory/runs/t/0001/job\.toml' --resume"):
        asked(directory, "runs/t", j7="COMPLETED")


def test_emulated_nodes_are_unknown_to_slurm(tmp_path: Path) -> None:
    import fcntl

    run = made(tmp_path)
    with open(run.lock, "w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        with pytest.raises(HpcMpError, match="is no job of Slurm but runs on emulated nodes"):
            pytest.fail(str(asked(tmp_path, "runs/t")))


def test_the_script_says_it() -> None:
    text = render(resolved(job=CPU), RUN, facts(), python=PYTHON, dependency="afterok:7").text
    assert "#SBATCH --dependency=afterok:7\n" in text
    assert "#SBATCH --dependency='afterok:7?afterok:8'\n" in render(
        resolved(job=CPU), RUN, facts(), python=PYTHON, dependency="afterok:7?afterok:8").text
    assert "--dependency" not in render(resolved(job=CPU), RUN, facts(), python=PYTHON).text


def test_a_launch_hands_it_to_slurm(tmp_path: Path, mark: str) -> None:
    cluster, job = Cluster(tmp_path), write_job(tmp_path)
    code, out, err = cluster.launch(mark, job, "--on", "slurm", "--set", 'slurm.depends=["4242"]')
    assert code == 0 and "depends   afterok: job 4242, RUNNING\n" in out, err
    assert "#SBATCH --dependency=afterok:4242\n" in the_run(job).script.read_text()
    assert load_job(the_run(job).job).slurm.depends == ("4242",)
