"""Rendered scripts and a real Slurm 22.05: golden scripts are accepted, and what ranks get from each form is what it says."""

import re
import shutil
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from rendering import CONF, CPU, FORMS, executable, golden, job
from slurm_lab.cluster import FINISHED
from slurm_lab.lab import Lab, wait_until
from slurm_lab.why_not import why_not

from hpc_mp.base.assets import asset
from hpc_mp.launch.facts import ask_cluster
from hpc_mp.launch.render import render

# The launching interpreter, as a host program that only starts what stands behind "--".
HOST = '#!/bin/bash\n[[ $4 == --after ]] && exit "$5"\nuntil [[ $1 == -- ]]; do shift; done\nshift\n"$@"\n'
# A rank that tells who and where it is, and its environment.
RANK = """#!/bin/bash
echo "here $SLURMD_NODENAME $SLURM_LOCALID of $SLURM_NTASKS in $PWD on $HPC_MP_RUN"
env | grep -vE '^(SLURM|SRUN|_=|OLDPWD|SHLVL|HOSTNAME|HOME|USER|LOGNAME|MAIL|SHELL|PATH|ENVIRONMENT|TERM|LANG)' | sed 's/^/env /'
"""


@pytest.fixture(scope="module")
def big() -> Iterator[Lab]:
    reason = why_not()
    if reason:
        pytest.skip(reason)
    with Lab(2, overrides=CONF) as running:
        running.run(["scontrol", "create", "reservation=monday-9", "starttime=now", "duration=60", "nodes=a[5-6]", "users=root",
                     "flags=ignore_jobs"], check=True)
        yield running


@pytest.mark.parametrize("name", FORMS)
def test_golden_scripts_are_accepted(big: Lab, name: str) -> None:
    said = big.run(["sbatch", "--test-only", str(golden(name, (22, 5)))])
    assert said.returncode == 0, said.stderr


def test_a_wrong_script_is_not(big: Lab) -> None:
    script = golden("gpus-per-node", (22, 5)).read_text().replace("h100:8", "h200:8")
    assert big.run(["sbatch", "--test-only"], input=script).returncode != 0


# --- what ranks get ---------------------------------------------------------------------------------------------------

POLLUTION = {
    "PYTHONPATH": "/x", "NCCL_DEBUG": "TRACE", "TORCH_LOGS": "all", "HF_HOME": "/h", "OMP_NUM_THREADS": "64", "RANK": "9",
    "CUDA_VISIBLE_DEVICES": "5", "SLURM_MEM_PER_CPU": "17", "SLURM_HINT": "multithread", "SLURM_CPUS_PER_TASK": "3",
    "SLURM_NTASKS_PER_NODE": "7", "SLURM_EXPORT_ENV": "NONE", "SLURM_KILL_BAD_EXIT": "0", "SLURM_CPU_BIND": "none"}


def run(lab: Lab, name: str, *options: str, runs: int = 1, user: str | None = None, environ: dict[str, str] | None = None,
        **sections: Any) -> tuple[list[str], list[str]]:
    """Submit the script of a job to an idle lab and wait for it: the lines of its logs, and what Slurm's own log says."""
    lab.wait_idle()
    here = lab.share / name
    shutil.rmtree(here, ignore_errors=True)  # of a test that is run again
    here.mkdir()
    here.chmod(0o777)
    host, rank = executable(here / "host", HOST), executable(here / "rank", RANK)
    sections["slurm"] = {"python": str(rank)} | sections.get("slurm", {})
    sections["job"] = CPU | {"nodes": 2, "ranks_per_node": 2, "time_limit": "5"} | sections.get("job", {})
    spec = job(**sections)
    folders = [here / f"run {number}" for number in range(runs)]
    for folder in folders:
        (folder / "log").mkdir(parents=True)
        for path in (folder, folder / "log"):
            path.chmod(0o777)
    facts = ask_cluster(spec, ask=lambda argv: lab.run(list(argv), check=True).stdout)
    assert facts.version == (22, 5) and facts.cpus == 4
    shutil.copy(asset("slurm/clean-environment.sh"), folders[0])
    (here / "job.sbatch").write_text(render(spec, folders, facts, python=str(host)).text)
    named = ["--nodelist=n[1-2]"] if spec.job.nodes == 2 else []  # of which tests know the names
    job_id = lab.sbatch(*named, *options, str(here / "job.sbatch"), user=user, environ=environ)

    def states() -> set[str]:
        """Of all elements and components; sbatch's own --wait looks after 2, 6 and 12 s."""
        return {*lab.run(["squeue", "--noheader", "--states=all", "--format=%T", f"--jobs={job_id}"], check=True).stdout.split()}

    wait_until(lambda: states() <= FINISHED, "the job's end", 90, 0.2)
    said = [line for path in folders[0].glob("slurm-*.log") for line in path.read_text().splitlines() if "SIGCONT" not in line]
    assert states() == {"COMPLETED"}, said
    return sorted(line for folder in folders for path in logs(folder) for line in path.read_text().splitlines()), said


def logs(folder: Path) -> Sequence[Path]:
    return sorted((folder / "log").iterdir())


def places(lines: Sequence[str]) -> set[str]:
    return {line.partition(" here ")[2].partition(" in ")[0] for line in lines if " here " in line}


def environment(lines: Sequence[str]) -> set[str]:
    return {re.sub(r"/run 0|/share/\w+|(?<=hpc-mp-0/)\d+", "", line.partition("env ")[2]) for line in lines if ": env " in line}


def test_the_same_run_from_any_shell(lab: Lab) -> None:
    clean, said = run(lab, "clean")
    found = logs(lab.share / "clean" / "run 0")
    assert [path.name for path in found] == ["node-n1.log", "node-n2.log"], "one log per node, with the task of each line"
    assert {line.partition(":")[0] for line in found[1].read_text().splitlines()} == {"2", "3"}
    assert places(clean) == {f"n{node} {task} of 4" for node in (1, 2) for task in (0, 1)} and said == []
    assert "OMP_NUM_THREADS=2" in environment(clean), "two ranks share four CPUs"
    polluted, said = run(lab, "polluted", environ=POLLUTION)
    assert (places(polluted), environment(polluted), said) == (places(clean), environment(clean), [])
    user, said = run(lab, "user", user="nobody", environ=POLLUTION)
    assert (places(user), said) == (places(clean), [])


def test_components_are_one_step(lab: Lab) -> None:
    slurm = {"components": [{"nodes": 1}, {"nodes": 2, "extra": {"mem": "500M"}}]}
    lines, said = run(lab, "components", job={"nodes": 3}, slurm=slurm | {"python": str(lab.share / "components/rank")})
    assert len(places(lines)) == 6 and all(place.endswith("of 6") for place in places(lines)) and said == []


def test_elements_of_an_array_run_in_their_directories(lab: Lab) -> None:
    lines, said = run(lab, "array", job={"nodes": 1, "ranks_per_node": 1}, runs=3,
                      sweep={"runs": [{}, {"train.seed": 1}, {"train.seed": 2}]},
                      slurm={"python": str(lab.share / "array/rank")})
    assert {line.partition(" on ")[2] for line in lines if " here " in line} == {
        str(lab.share / "array" / f"run {number}") for number in range(3)} and said == []
    assert len(list((lab.share / "array" / "run 0").glob("slurm-*_[0-2].log"))) == 3
