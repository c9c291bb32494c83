"""Two commands that are asked the same question give the same answer."""

import json
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from launching import executable, mark, the_run, write_job
from played_slurm import Cluster

from hpc_mp.base.text import memory_size
from hpc_mp.cli.main import cli
from hpc_mp.rundir import read_json

__all__ = ["mark"]  # a fixture
LAYOUT = ("--set", "parallel.tensor=2", "--set", "parallel.microbatches=2", "--set", 'parallel.order="PTD"')


@pytest.fixture
def cluster(tmp_path: Path) -> Cluster:
    """A played Slurm whose sbatch keeps the script that it was given."""
    played = Cluster(tmp_path)
    executable(played.bin, "sbatch", f'cat "$2" > {tmp_path}/given; echo 4242')
    return played


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def said(*words: str | Path, code: int = 0) -> Any:
    done = CliRunner().invoke(cli, [*map(str, words), "--json"])
    assert done.exit_code == code, done.output
    return json.loads(done.stdout)


def test_the_script_that_is_shown_is_the_one_that_sbatch_gets(cluster: Cluster, job: Path, mark: str) -> None:
    _, shown, _ = cluster.launch(mark, job, "--on", "slurm", "--dry-run", *LAYOUT)
    _, document, _ = cluster.launch(mark, job, "--on", "slurm", "--dry-run", "--json", *LAYOUT)
    assert not the_run(job).path.exists(), "a dry run leaves nothing"
    code, _, err = cluster.launch(mark, job, "--on", "slurm", *LAYOUT)
    assert code == 0, err
    given = (cluster.folder / "given").read_text()
    assert given == the_run(job).script.read_text() == json.loads(document)["script"]
    assert shown.rstrip("\n") == given.rstrip("\n")
    _, other, _ = cluster.launch(mark, job, "--on", "slurm", "--dry-run", "--set", "job.nodes=1")
    assert other.rstrip("\n") != given.rstrip("\n"), "another job is another script"


def test_our_own_linter_has_nothing_against_the_script(cluster: Cluster, job: Path, mark: str) -> None:
    cluster.launch(mark, job, "--on", "slurm", *LAYOUT)
    script = the_run(job).script
    assert [found for found in said("lint", script)["findings"] if found["severity"] != "info"] == []
    script.write_text(script.read_text().replace("#SBATCH --nodes=2", "#SBATCH --nodes 2 --bogus"))
    done = CliRunner().invoke(cli, ["lint", str(script), "--json"])
    assert json.loads(done.stdout)["findings"] != [], "a spoilt script would be seen"


def test_a_run_is_placed_as_placement_says(cluster: Cluster, job: Path, mark: str) -> None:
    cluster.launch(mark, job, "--on", "slurm", *LAYOUT)
    placed = read_json(the_run(job).placement)
    degrees = ("--tp", "2", "--pp", "1", "--dp", "2", "--ranks-per-node", "2")
    assert said("placement", *degrees, "--order", "PTD")["ranks"] == placed["ranks"]
    assert said("placement", *degrees, "--order", "DPT")["ranks"] != placed["ranks"], "another order would be seen"


def test_the_state_of_the_summary_is_that_of_the_plan(cluster: Cluster, job: Path, mark: str) -> None:
    _, out, err = cluster.launch(mark, job, "--on", "slurm", *LAYOUT)
    per_rank = [sum(rank.values()) for rank in read_json(the_run(job).path / "plan.json")["state"]]
    assert f"state     {memory_size(max(per_rank))}" in out + err, (max(per_rank), out)
    assert memory_size(max(per_rank)) != memory_size(2 * max(per_rank))
