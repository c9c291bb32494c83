"""``slurm.depends``: what runs and jobs become ``--dependency``, and which are refused."""

from pathlib import Path

import pytest
from launching import held, make_run, record, the_run, write_job
from played_slurm import Cluster
from rendering import CPU, PYTHON, RUN, facts
from rendering import job as resolved
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import load_job
from hpc_mp.launch.depends import dependencies
from hpc_mp.launch.render import render
from hpc_mp.rundir import RunDirectory, write_json
from hpc_mp.rundir.runs import record_successors


def made(folder: Path, job_id: str | None = None, state: str | None = None, chain: tuple[str, ...] = ()) -> RunDirectory:
    run = make_run(load_job(write_job(folder)))
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


@pytest.mark.parametrize(("state", "word"), [("completed", ""), ("failed", "afterany:"), ("stopped", "afternotok:")])
def test_what_has_come_already_needs_no_wait(tmp_path: Path, state: str, word: str) -> None:
    made(tmp_path, "7", state)
    option, said = asked(tmp_path, f"{word}runs/t", "7", j7="COMPLETED")
    assert option is None and f"the run has {state}, nothing to wait for" in said[0]
    assert said[1] == "7: job 7 has ended as COMPLETED, nothing to wait for"


@pytest.mark.parametrize(("state", "word", "words"), table(__file__, "depends.toml", "refused"))
def test_what_is_refused(tmp_path: Path, state: str, word: str, words: str) -> None:
    directory = tmp_path / "a directory"
    directory.mkdir()
    if state:
        made(directory, "7", state)
    with pytest.raises(HpcMpError, match=words):
        asked(directory, word, j8="FAILED", **({"j7": "COMPLETED"} if state else {}))


def test_emulated_nodes_are_unknown_to_slurm(tmp_path: Path) -> None:
    with held(made(tmp_path)), pytest.raises(HpcMpError, match="is no job of Slurm but runs on emulated nodes"):
        asked(tmp_path, "runs/t")


@pytest.mark.parametrize(("dependency", "lines"), table(__file__, "depends.toml", "directives"))
def test_the_script_says_it(dependency: str | None, lines: list[str]) -> None:
    text = render(resolved(job=CPU), RUN, facts(), python=PYTHON, dependency=dependency).text
    assert [line for line in text.splitlines() if "--dependency" in line] == lines


def test_a_launch_hands_it_to_slurm(tmp_path: Path, mark: str) -> None:
    cluster, job = Cluster(tmp_path), write_job(tmp_path)
    code, out, err = cluster.launch(mark, job, "--on", "slurm", "--set", 'slurm.depends=["4242"]')
    assert code == 0 and "depends   afterok: job 4242, RUNNING\n" in out, err
    assert "#SBATCH --dependency=afterok:4242\n" in the_run(job).script.read_text()
    assert load_job(the_run(job).job).slurm.depends == ("4242",)
