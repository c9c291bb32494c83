"""Why a start died: recorded and real-looking ends, what goes before what, any text at all, and tasks that were never started."""

from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from launching import silent
from recorded_ends import BOOM, ENDINGS, ENDS_OTHERS, HOSTS, JOB, OVER_LIMIT, PROGRAM_ENDINGS, WATCHDOG, XID_79, said, tables
from rendering import job
from tables import table

from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import TasksRefused, first_code, gave_up, not_started, task_ends
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import AttemptRecord, RunDirectory, create_run, write_json
from hpc_mp.rundir.failures import ECHO, KINDS
from hpc_mp.rundir.records import RankStart, line_of
from hpc_mp.supervisor.context import AttemptContext
from hpc_mp.supervisor.gather import ScriptLog, gather

RETRIED = {"hardware", "storage", "node", "unfit", "signal", "ended", "cancelled", "lost", "hang", "silent", "network", "peer",
           "orphaned"}


@pytest.mark.parametrize(("evidence", "kind", "nodes", "words"), [
    pytest.param(*rest, id=name) for name, *rest in (*ENDINGS, *PROGRAM_ENDINGS)])
def test_endings(evidence: Evidence, kind: str, nodes: tuple[str, ...], words: str) -> None:
    found = classify(evidence)
    assert (found.kind, found.nodes, found.retry) == (kind, nodes, kind in RETRIED)
    assert words in found.message and "\n" not in found.message


def test_every_kind_has_an_ending() -> None:
    # said by the launcher, of emulated nodes, in the history alone, when a run has ended, by the job script, of saves
    elsewhere = {"launcher", "straggled", "vanished", "removed", "supervisor", "unwritable"}
    assert {kind for _, _, kind, _, _ in ENDINGS} | elsewhere == set(KINDS)


EXPLAINED = [evidence for _, evidence, kind, _, _ in ENDINGS if KINDS[kind].level < ECHO or kind in ("lost", "network")]


@given(st.sampled_from(EXPLAINED), st.sampled_from([0, 1, 6, 7]), st.floats(0, 100), st.booleans())
def test_an_echo_changes_nothing(evidence: Evidence, rank: int, time: float, logged: bool) -> None:
    """A peer that waited in vain, before or after, in a record or a log; not the very rank that ended without a word."""
    echo = said(rank, HOSTS[rank // 2], "peer", "DistBackendError: NCCL timeout: ncclRemoteError: remote process exited", time)
    more = replace(evidence, failures=(echo, *evidence.failures))
    if logged:
        more = replace(more, logs={"n9": (WATCHDOG,), **more.logs})
    assert classify(more) == classify(evidence)


APART = [end for end in ENDINGS if end[2] not in ("silent", "hang")]  # who waits for whom is said by all ranks of one attempt


@pytest.mark.parametrize("one", APART, ids=lambda end: end[0])
def test_the_stronger_of_two_explains(one: tuple) -> None:
    """Records, kernel and states of two ends together; a word from a rank that ended without one is the exception. Of two of one
    level the one that has a time comes first."""
    for other in APART:
        strongest, kind = strongest_and_judged(one, other)
        assert kind == strongest or {kind, strongest} == {"orphaned", "node"}, other[0]


def strongest_and_judged(one: tuple, other: tuple) -> tuple[str, str]:
    """Return the stronger kind of two ends, and the judge's when it is given both; equal if their evidence cannot be joined."""
    first, second = (replace(end[1], srun=(), logs={}) for end in (one, other))
    both = replace(first, failures=first.failures + second.failures, kernel={**first.kernel, **second.kernel},
                   pids={**first.pids, **second.pids},
                   states={**first.states, **second.states}, hang=first.hang or second.hang,
                   unended=first.unended or second.unended)
    strongest = min((classify(first).kind, classify(second).kind), key=list(KINDS).index)
    if set(first.kernel) & set(second.kernel) or set(first.states) & set(second.states):
        return strongest, strongest
    return strongest, classify(both).kind


LINES = st.lists(st.one_of(st.text(max_size=60), st.sampled_from([*ENDS_OTHERS, XID_79, WATCHDOG, *OVER_LIMIT.srun])), max_size=8)


@given(LINES, st.dictionaries(st.sampled_from(HOSTS), LINES.map(tuple)), st.dictionaries(st.text(max_size=4), LINES.map(tuple)),
       st.integers(-64, 255))
def test_any_text(lines: list[str], logs: dict, kernel_: dict, code: int) -> None:
    found = classify(replace(JOB, code=code, srun=tuple(lines), logs=logs, kernel=kernel_))
    assert found.retry == KINDS[found.kind].retry


@given(st.lists(st.from_regex(r"srun: error: n[1-4]: tasks? [0-9,-]{1,12}: [A-Z][a-z ]{1,20}[0-9]{0,3}", fullmatch=True)))
def test_any_end_of_tasks(lines: list[str]) -> None:
    for end in task_ends(lines):
        assert end.line in lines


def test_the_first_code_is_the_cause() -> None:
    """srun's own code is 143 once it has ended the other tasks (recorded with a task that exits with 75)."""
    assert first_code(("srun: error: n3: task 5: Exited with exit code 75", *ENDS_OTHERS)) == 75
    assert first_code(ENDS_OTHERS) is None
    assert [end.tasks for end in task_ends(("srun: error: n2: tasks 0-1,3: Killed",))] == [(0, 1, 3)]


STEPS = tables("srun_steps.toml")
del STEPS["parts"]


@pytest.mark.parametrize("name", STEPS)
def test_srun_gives_up_on_tasks(name: str) -> None:
    """srun 22.05 then ended with 0 (recorded: ranks were killed whose children went on writing into their output)."""
    assert gave_up(STEPS[name]["srun"]) is STEPS[name]["gives_up"]


def attempt(run: RunDirectory) -> AttemptContext:
    given, record = Allocation("7", 0, HOSTS, "lab", None), AttemptRecord("7.0.1", 1, HOSTS, "n1", 10000, "s")
    return AttemptContext(run, job(), place(Degrees(tensor=2, pipeline=2, data=2), "DPT", 2), given, record=record, host_order="")


def test_gather(tmp_path: Path) -> None:
    """From the files of a run and the answers of Slurm to rank, host and coordinates."""
    run = create_run(tmp_path, "job")
    logs = {"srun.log": OVER_LIMIT.srun[:-1], "node-n3.log": OVER_LIMIT.logs["n3"],
            "kernel-n3.log": ("memory.events oom_kill 0",)}
    for name, lines in logs.items():
        (run.log / name).write_text("".join(f"{line}\n" for line in lines))
    script = run.path / "slurm-7.log"
    script.write_text("slurmstepd: error: *** JOB 7 ON n1 CANCELLED DUE TO TIME LIMIT ***\n")  # of an earlier start
    since = ScriptLog(script, script.stat().st_size)
    with open(script, "a") as file:
        file.write("".join(f"{line}\n" for line in OVER_LIMIT.srun[-1:]))
    run.ranks.write_text(line_of(RankStart(1, 5, "n3", "n3", 0.0, pid=99)) + "\n")
    write_json(run.failure(1, 0), {"rank": 0, "node": "n1", "kind": "peer", "message": "gone", "time": 1.0})
    write_json(run.failure(2, 5), {"rank": 5, "node": "n3", "kind": "error", "message": "another attempt's", "time": 1.0})
    asked = []

    def slurm(argv: tuple[str, ...]) -> str:
        asked.append(argv[0])
        return {"sinfo": "n1|allocated|none\nn3|allocated|none\n", "sacct": "5\n"}[argv[0]]

    evidence = gather(attempt(run), 137, since, slurm)
    assert (evidence.srun, evidence.pids) == (OVER_LIMIT.srun, {("n3", 99): 5})
    assert [failure.rank for failure in evidence.failures] == [0]
    assert (classify(evidence).rank, classify(evidence).log) == (5, str(run.node_log("n3")))
    assert asked == ["sinfo", "sacct"]


@pytest.mark.parametrize("last", [(), ("bye",)])
def test_a_rank_that_another_one_has_drowned(last: tuple[str, ...], tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    with open(run.node_log("n3"), "w") as log:
        log.write("".join(f"{line}\n" for line in BOOM))
        log.writelines(f"4: {'x' * 1000}\n" for _ in range(2000))
        log.writelines(f"5: {word}\n" for word in last)
    run.srun_log.write_text("".join(f"{line}\n" for line in ("srun: error: n3: task 5: Exited with exit code 1", *ENDS_OTHERS)))
    spec = job(job={"nodes": 4, "ranks_per_node": 2, "device": "cpu"}, program={"command": ["x"]})
    assert "ValueError: boom (train.py:7)" in classify(gather(replace(attempt(run), spec=spec), 1, None, silent)).message


def test_gather_finds_nothing(tmp_path: Path) -> None:
    assert classify(gather(attempt(RunDirectory(tmp_path)), 1, None, silent)).kind == "unknown"


# srun's words of the tasks of two nodes of which rank 2 of mpirun has ended: the daemon's end is no rank's, nor is mpirun's.
MPIRUN = ("srun: launch/slurm: _task_finish: n2: task 1: Completed",
          "mpirun: there are not enough slots", "srun: error: n1: task 0: Exited with exit code 213",
          "srun: launch/slurm: _step_signal: Terminating StepId=9.0")


def test_under_mpirun_the_rank_that_has_said_so_is_the_cause_and_no_task_of_a_node() -> None:
    ended = replace(JOB, code=213, srun=MPIRUN, program=True, by_mpirun=True,
                    failures=(said(2, "n2", "exit", "ended with exit code 4", 40.0),))
    found = classify(ended)
    assert (found.kind, found.rank, found.node, found.log) == ("exit", 2, "n2", "/run/log/rank-00002.log")
    wordless = replace(ended, failures=())
    cause = classify(wordless)
    assert (cause.kind, cause.rank, cause.node) == ("launcher", None, "n1")
    assert cause.message.endswith("exit code 213 (mpirun's code); its last words: mpirun: there are not enough slots"), cause
    assert classify(replace(wordless, by_mpirun=False)).rank == 0, "of srun's own ranks a task is one"


@pytest.mark.parametrize(("end", "words"), table(__file__, "diagnose.toml", "ends_of_mpirun"))
def test_a_rank_of_mpirun_that_notices_an_end_may_end_before_it(end: str, words: str) -> None:
    """Open MPI ends it with 14, some milliseconds before or after the rank that it has lost."""
    lost = [said(rank, node, "exit", f"ended with exit code 14{more}", 39.99) for rank, node, more in (
        (0, "n1", ""), (3, "n2", "; its last words: and MPI will try to terminate your MPI job as well)"))]
    ended = replace(JOB, code=213, srun=MPIRUN, program=True, by_mpirun=True, failures=(*lost, said(2, "n2", end, words, 40.0)))
    found = classify(ended)
    assert (found.kind, found.rank, found.node) == (end, 2, "n2"), found
    alone = classify(replace(ended, failures=(said(0, "n1", "exit", "ended with exit code 15", 39.0), *ended.failures)))
    assert alone.rank == 0, "any other code is an end of its own"


PLACES = {place_.rank: place_ for place_ in place(Degrees(data=4), "DPT", 2).ranks}
OF_TWO = Evidence(code=1, places=PLACES, hosts=("n1", "n2"), supervisor_host="n1", run=RunDirectory(Path("/run")))
RECORDED = tables("not_started.toml")
del RECORDED["parts"]
SEEN = {name: RECORDED[f"no {name}"]["refused"]["reason"] for name in ("image", "sif")}


def log(name: str, host: str) -> tuple[str, ...]:
    return tuple(line.replace("HOST", host) for line in RECORDED[name]["log"])


def ended(one: str, other: str, code: int) -> Evidence:
    said = (f"srun: error: n1: tasks 0-1: Exited with exit code {code}",
            "srun: launch/slurm: _step_signal: Terminating StepId=1.1",
            f"srun: error: n2: tasks 2-3: Exited with exit code {code}")
    return replace(OF_TWO, srun=said, logs={"n1": log(one, "n1"), "n2": log(other, "n2")})


@pytest.mark.parametrize("name", RECORDED)
def test_what_slurmstepd_says(name: str) -> None:
    refused = RECORDED[name].get("refused")
    assert not_started(log(name, "n1")) == (TasksRefused(**refused) if refused else None)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize(("one", "other", "code", "kind", "nodes", "words"), table(__file__, "diagnose.toml", "verdicts"))
def test_the_verdict(program: bool, one: str, other: str, code: int, kind: str, nodes: list[str], words: str) -> None:
    found = classify(replace(ended(one, other, code), program=program))
    assert (found.kind, [*found.nodes]) == (kind, nodes)
    assert words.format(**SEEN) in found.message


@pytest.mark.parametrize("words", table(__file__, "diagnose.toml", "no_launcher"))
def test_an_mpi_that_does_not_know_its_launcher_names_the_key(words: str) -> None:
    """Open MPI 4.1.4 and 5.0.11 with pmi2, MPICH 5.0.2 with pmix, started by srun 22.05.8."""
    said = {"n1": (f"0: {words}", "0: *** An error occurred in MPI_Init"), "n2": ()}
    srun = ("srun: error: n1: tasks 0-1: Exited with exit code 1",)
    found = classify(replace(OF_TWO, logs=said, srun=srun, program=True))
    assert 'slurm.mpi = "pmix" for Open MPI' in found.message and words in found.message and not found.retry
    other = classify(replace(OF_TWO, logs={"n1": ("0: MPI_ABORT was invoked",), "n2": ()}, srun=srun, program=True))
    assert "slurm.mpi" not in other.message
