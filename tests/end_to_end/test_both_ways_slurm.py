"""Job scripts by sbatch and adopted: their programs get the same. `both_ways.py` does so with any directory of scripts."""

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
WRITTEN = tuple(Case(name, "job one.sbatch", f"{HEAD}#SBATCH {text}\n", 0)
               for name, text in table(__file__, "both_ways_slurm.toml", "written").items())
IMPOSSIBLE = Case("more tasks than fit", "job.sbatch", "#!/bin/bash\n#SBATCH -N 1 -n 3 --ntasks-per-node=2\nsimulate\n", 0)
CONTROLS = tuple(Case(name, "job.sbatch", f"#!/bin/bash\n{text}\n", 0)
                for name, text in table(__file__, "both_ways_slurm.toml", "controls").items())

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
