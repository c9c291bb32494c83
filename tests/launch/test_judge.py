"""How ``hpc-mp launch`` judges the end of a run on emulated nodes, and which figures it reads."""

import json
import math
import os
from pathlib import Path
from typing import Any

import pytest
from launching import record, said
from tables import table

from hpc_mp.base.exit_codes import ending
from hpc_mp.base.line_file import NewLines
from hpc_mp.job.program import Program
from hpc_mp.launch.backends.watch import RanksEnd, judge
from hpc_mp.launch.emulator.emulator import Exit
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import create_run
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.failures import read_failures
from hpc_mp.rundir.outcome import Cause, Outcome, figures
from hpc_mp.rundir.records import RankStatus


def end(rank: int, code: int, time: float = 0.0, ours: bool = False) -> Exit:
    return Exit(rank, code, time, ours)


PLACED = place(Degrees(data=4), "DPT", 2)


@pytest.mark.parametrize(("words", "exits", "state", "kind", "rank"), table(__file__, "judge.toml", "causes"))
def test_the_first_cause(tmp_path: Path, words: dict[str, tuple[str, float]], exits: list[list[Any]], state: str,
                         kind: str | None, rank: int | None) -> None:
    run = create_run(tmp_path, "job")
    for who, (what, when) in words.items():
        said(run, int(who), what, when)
    found, cause = judge(RanksEnd(tuple(end(*row) for row in exits)), AttemptReader(run, 1), PLACED)
    assert found == state
    assert (cause and cause.kind, cause and cause.rank) == (kind, rank)


def test_peers_lost_by_a_stop_are_no_failure(tmp_path: Path) -> None:
    attempt, other = (AttemptReader(create_run(tmp_path, name), 1) for name in ("job", "ended"))
    said(attempt.run, 1, "peer", 2.0)
    exits = (end(0, -15, 1.0, ours=True), end(1, 1, 2.1))
    assert judge(RanksEnd(exits, interrupted=False), attempt, PLACED)[0] == "failed"
    for ends in (exits, (end(0, -9, 1.0, ours=True), end(2, -9, 1.0, ours=True))):
        assert judge(RanksEnd(ends, interrupted=True), attempt, PLACED) == ("stopped", None)
    well = RanksEnd(tuple(end(rank, 0, 1.0) for rank in range(4)), interrupted=True)
    for program, state in ((Program(command=("x",)), "stopped"), (None, "completed")):  # programs may end well after SIGTERM
        assert judge(well, other, PLACED, program=program)[0] == state


def test_causes_say_who_where_why(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    attempt = AttemptReader(run, 1)
    _, cause = judge(RanksEnd((end(3, -9),)), attempt, PLACED)
    assert cause == Cause("signal", "rank 3 (dp 3, pp 0, tp 0) on node1 was killed by SIGKILL (the system ran out of memory, or "
                          "another process killed it)", 3, "node1", str(run.rank_log(3)),
                          cause.time if cause else 0.0, retry=True)
    run.failure(1, 3).unlink()
    with open(run.rank_log(3), "a") as log:
        log.write("training\nterminate called\n\n")
    _, cause = judge(RanksEnd((end(3, 1),)), attempt, PLACED)
    assert cause and cause.message.endswith("on node1 ended with exit code 1; its last words: terminate called")
    assert ending(-64) == "was killed by SIGRTMAX" and "SIGSEGV" in ending(-11)


def test_figures_are_of_the_run_and_the_speed_of_the_attempt(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    assert figures(run, 1)["loss"] is None
    lines = [record(1, loss=9.0), record(2), record(3, 2, 50.0), record(4, 2, 1.0), record(5, 2, 3.0, loss=0.1)]
    run.metrics.write_text("\n".join(lines) + "\n" + lines[-1][:10])
    found = figures(run, 2)
    assert found == {"steps": 5, "first_step": 1, "first_loss": 9.0, "loss": 0.1, "evaluation_loss": None,
                     "best_evaluation_loss": None, "tokens_per_s": 50.0, "checkpoint": None, "best_checkpoint": None}
    run.metrics.write_text(record(131, loss=math.nan) + "\n" + record(132, loss=6.0) + "\n" + record(140, loss=5.9) + "\n")
    found = figures(run, 2)
    assert (found["first_step"], found["first_loss"], found["steps"], found["loss"]) == (132, 6.0, 140, 5.9)
    text = json.dumps(Outcome(tmp_path, "failed", loss=math.nan, first_loss=0.1 + 0.2).document())
    assert json.loads(text)["loss"] is None and "0.30000000000000004" in text and "NaN" not in text


def test_tail_gives_every_complete_line_once(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    tail = NewLines(path)
    assert tail.read() == []
    path.write_text('{"a": 1}\n{"a": ')
    assert tail.read() == ['{"a": 1}']
    with open(path, "a") as file:
        file.write("2}\n")
    assert tail.read() == ['{"a": 2}']
    (tmp_path / "new").write_text('{"a": 1}\n{"a": 3}\n')  # a resume cuts the file back
    os.replace(tmp_path / "new", path)
    assert tail.read() == ['{"a": 1}', '{"a": 3}']


def test_what_earlier_attempts_left_is_passed_over(tmp_path: Path) -> None:
    run = create_run(tmp_path, "job")
    attempt = AttemptReader(run, 2)
    (run.path / "status.json").write_text(json.dumps({"attempt": 1, "phase": "training"}))
    run.metrics.write_text(record(1) + "\n" + record(2, 2) + "\n")
    said(run, 0, "error", 1.0)
    assert attempt.status() is None and read_failures(run, 2) == []
    assert [one.step for one in attempt.steps()] == [2]
    (run.path / "status.json").write_text(json.dumps({"attempt": 2, "phase": "training"}))
    assert attempt.status() == RankStatus(2, "training")
