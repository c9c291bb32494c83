"""Job scripts by sbatch and adopted: their programs get the same. `both_ways.py` does so with any directory of scripts."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
from both_ways import drawn_cases
from both_ways_compare import Plain, Way, differences, without_witness
from both_ways_run import Case, lab_for, run_all
from both_ways_sandbox import programs, scaled
from both_ways_scripts import drawn_script
from slurm_lab.why_not import why_not
from tables import table

CELLS, LIMIT = 8, 300.0
DRAWN = tuple(drawn_cases(30, seed=1))
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=5\n"
STEP = "srun --exact -N1 -n1 -w $SLURMD_NODENAME --mem=100"  # otherwise which of two steps gets which node is a race
WRITTEN = tuple(Case(name, "job one.sbatch", f"{HEAD}#SBATCH {text}\n", 0) for name, text in {
    "sizes that differ": "-n 3\nsimulate first\nsrun simulate --lr $LR \"a b\" '$HOME' é $SLURM_NTASKS",
    "loop and function": "--ntasks-per-node=2\nf() { srun -l simulate \"$@\"; }\nfor i in 1 2; do f $i; done",
    "parallel": f"-n 4\n{STEP} simulate a &\n{STEP} simulate b &\nwait",
    "branch": "-n 2\nmkdir -p sub; cd sub\nif srun false; then :; else srun simulate no; fi",
    "components": "-n 2\nsrun -n1 simulate server : -n1 simulate client",
    "two inputs": "--ntasks=2\nsrun -n1 simulate <<EOF\n$USER line\nEOF\necho a file >seen.txt\nsrun --input=seen.txt simulate",
    "directory and program": "--ntasks=2\nmkdir -p sub\nsrun --chdir=sub simulate x && simulate post",
    "multi-prog": "--ntasks=2\nsimulate first\nprintf '0 /usr/bin/env simulate zero\\n1 /usr/bin/env simulate one\\n' >conf\n"
                  "srun --multi-prog conf",
    "bash -c": "--ntasks-per-node=2\nsrun bash -c 'simulate of $SLURM_PROCID'",
    "torchrun": "--ntasks-per-node=1\nsrun python -m torch.distributed.run --nnodes 1 --nproc_per_node 1 train.py x",
    "an array of one": "--array=4-4:2\nsimulate $SLURM_ARRAY_TASK_ID",
    "uneven GPUs, which Slurm 22.05 refuses to a step of all nodes": "--gpus=4\nsimulate first\nsrun --gpus=0 simulate x",
    "exit code 7": "--ntasks=2\nsrun simulate x\nexit 7",
    "set -e": "--ntasks=2\nset -e\nsrun simulate x\nsrun bash -c 'exit $SLURM_PROCID'\nsrun simulate never"}.items())
IMPOSSIBLE = Case("more tasks than fit", "job.sbatch", "#!/bin/bash\n#SBATCH -N 1 -n 3 --ntasks-per-node=2\nsimulate\n", 0)
# A script that tells both ways apart: what it starts with differs, or how it ends.
CONTROLS = tuple(Case(name, "job.sbatch", f"#!/bin/bash\n{text}\n", 0) for name, text in {
    "argument": "srun -n1 simulate ${HPC_MP_RUN:+ours}", "variable": "export TOLD=${HPC_MP_RUN:+ours}; simulate",
    "directory": "[ -z \"$HPC_MP_RUN\" ] || cd /; simulate", "input": "echo ${HPC_MP_RUN:+ours} | simulate",
    "exit code": "[ -z \"$HPC_MP_RUN\" ]", "more ranks": "srun -n${HPC_MP_RUN:+1}1 --overcommit simulate",
    "file": "echo ${HPC_MP_RUN:+ours} >made.txt", "elsewhere": "[ -z \"$HPC_MP_RUN\" ] || touch /tmp/left ~/left"}.items())

EXPECTED = ((DRAWN, "equal"), (WRITTEN, "equal"), ((IMPOSSIBLE,), "refused"), (CONTROLS, "differs"))


@pytest.fixture(scope="module")
def results() -> Iterator[dict[str, dict[str, Any]]]:
    """Yield the results of all scripts, by their names: they run several at a time, on a lab of their own."""
    if reason := why_not():
        pytest.skip(reason)
    cases = [case for group, _ in EXPECTED for case in group]
    with lab_for(CELLS) as lab:
        yield {result["script"]: result for result in run_all(lab, cases, CELLS, LIMIT)}


@pytest.mark.prove
@pytest.mark.timeout(3000)
@pytest.mark.parametrize(("name", "state"), [(case.name, state) for group, state in EXPECTED for case in group])
def test_a_script_gets_the_same_both_ways(name: str, state: str, results: dict[str, dict[str, Any]]) -> None:
    """And whatever differs is noticed. What is equal has started programs, which were compared."""
    result = results[name]
    assert result["state"] == state, result
    assert result["programs"] or state != "equal", result


def recording(**changes: Any) -> dict[str, Any]:
    return {"name": "train", "words": ["a"], "directory": "/w", "variables": {"A": "1"}, "input": "", "step": "task", "rank": "0",
            "host": "n1", "status": {}, "files": [], **changes}


def way(*programs: dict[str, Any], **changes: Any) -> Way:
    return Way(programs, **{"files": {"a": "text"}, "elsewhere": frozenset(), "code": 0, **changes})


@pytest.mark.parametrize(("other", "kind"), [
    (way(), "program"), (way(recording(), recording()), "program"), (way(recording(words=["b"])), "program"),
    (way(recording(rank="1")), "program"), (way(recording(host="n2")), "program"), (way(recording(directory="/")), "directory"),
    (way(recording(input="x")), "input"), (way(recording(variables={"A": "2"})), "variable A"),
    (way(recording(variables={})), "variable A"), (way(recording(variables={"A": "1", "B": ""})), "variable B"),
    (way(recording(files=[3])), "files"),
    (way(recording(), code=1), "exit code"), (way(recording(), files={}), "file a"),
    (way(recording(), elsewhere=frozenset({"/tmp/x"})), "elsewhere"), (way(recording(), refused="no"), "refused")])
def test_a_spoilt_recording_is_noticed(other: Way, kind: str) -> None:
    assert differences(way(recording()), way(recording())) == []
    (line, *_) = differences(way(recording()), other)
    assert line.startswith(kind)


def test_what_differs_from_job_to_job_is_taken_away() -> None:
    plain = Plain(["7000001"], ["/runs/job/0001/script"], "/runs/job/0001/.shims")
    assert plain.text("log-7000001 /runs/job/0001/script /var/spool/n1/job7000001/slurm_script") == "log-JOB SCRIPT SCRIPT"
    assert plain.path("/runs/job/0001/.shims:/bin::/usr/bin") == "/bin::/usr/bin" and Plain([], [], "").path("a::") == "a::"
    witness = ["/bin/python", "-PE", "-m", "hpc_mp.program.witness", "/run", "7.0.1", "1", "1", "mpi", "0"]
    assert without_witness(["-n", "1", *witness, "./a", ":", *witness, "./b"]) == ["-n", "1", "./a", ":", "./b"]


@pytest.mark.parametrize(("line", "expected"), table(__file__, "both_ways_slurm.toml", "scaled"))
def test_directives_are_scaled(line: str, expected: str) -> None:
    text = f"#!/bin/bash\n#SBATCH {line}  # why\necho\n#SBATCH {line}\n"
    lines = scaled(text, "c0").split("\n")
    assert lines[:2] == ["#!/bin/bash", "#SBATCH --partition=c0"] and lines[3:] == ["echo", f"#SBATCH {line}", ""]
    assert lines[2].removesuffix("  # why") == (f"#SBATCH {expected}" if expected else "#")


def test_programs_that_do_not_exist_here_are_known() -> None:
    text = "#!/bin/bash\nf() { in-f; }\nif ./main a; then srun -n2 nowhere x | cat; fi\nX=$(bin/tool) f\n/opt/x/y\n"
    assert programs(text) >= {"in-f", "./main", "bin/tool"} and not programs(text) & {"f", "cat", "srun", "/opt/x/y"}


def test_a_drawn_script_is_drawn_again() -> None:
    assert drawn_script(5) == drawn_script(5) != drawn_script(6)
    assert len({drawn_script(seed) for seed in range(50)}) > 40
