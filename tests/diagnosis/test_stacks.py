"""Stacks as py-spy and faulthandler leave them, and tracebacks as Python and torch write them."""

import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_ends import tables
from tables import table

from hpc_mp.diagnosis.stacks import (
    Frame,
    RankStack,
    aborted,
    before_abort,
    main_thread,
    numbers,
    read_stacks,
    sentence_of,
    standing_apart,
)
from hpc_mp.diagnosis.tracebacks import last_error
from hpc_mp.rundir import RunDirectory, create_run

TORCH = "/opt/py/lib/python3.11/site-packages/torch"
MAIN = Frame("/home/ann/train.py", 52, "main")
REDUCES = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 3030, "all_reduce"),
           Frame(f"{TORCH}/distributed/c10d_logger.py", 83, "wrapper"), MAIN)
BARRIER = (Frame(f"{TORCH}/distributed/distributed_c10d.py", 4100, "barrier"), Frame("/home/ann/train.py", 60, "<module>"))
BACKWARD = (Frame(f"{TORCH}/autograd/graph.py", 829, "_engine_run_backward"), Frame(f"{TORCH}/_tensor.py", 630, "backward"), MAIN)
MEETS = (Frame(f"{TORCH}/distributed/rendezvous.py", 200, "_env_rendezvous_handler"),
         Frame(f"{TORCH}/distributed/distributed_c10d.py", 1700, "init_process_group"), MAIN)
LOADS = (Frame("/home/ann/train.py", 41, "next_batch"), MAIN)
QUEUE = (Frame("/opt/py/lib/python3.11/threading.py", 331, "Condition.wait"),
         Frame(f"{TORCH}/utils/data/dataloader.py", 1251, "_try_get_data"), Frame("/home/ann/train.py", 41, "next_batch"), MAIN)
NOTHING: tuple[Frame, ...] = ()
IMPORTS = (Frame(f"{TORCH}/autograd/__init__.py", 9, "<module>"), MAIN)
OWN_REDUCE, OWN_WAIT = ((Frame("/home/ann/solver.py", 7, name), MAIN) for name in ("Mesh.all_reduce", "wait"))
LOADS_BY_REDUCING = (*LOADS, *REDUCES)


@pytest.mark.parametrize(("frames", "waits", "words"), table(__file__, "stacks.toml", "standings", globals()))
def test_where_a_rank_stands(frames: tuple[Frame, ...], waits: bool, words: str) -> None:
    stack = RankStack(0, frames, "state D (nfs_wait)")
    assert (stack.waits, str(stack)) == (waits, words)


@pytest.mark.parametrize(("stands", "first", "apart"), table(__file__, "stacks.toml", "awaited", globals()))
def test_for_whom_the_others_wait(stands: list[tuple[Frame, ...]], first: int | None, apart: int | None) -> None:
    assert standing_apart([RankStack(rank, frames, "state D") for rank, frames in enumerate(stands)], first) == apart


def test_a_rank_that_has_not_told_is_not_apart() -> None:
    asleep = [RankStack(0, NOTHING, "state S (futex_do_wait)"), *(RankStack(rank, REDUCES) for rank in (1, 3))]
    assert standing_apart([*asleep, RankStack(2, LOADS)], None) == 2 and standing_apart(asleep, None) is None


def test_the_sentence() -> None:
    stacks = [RankStack(rank, LOADS if rank == 2 else REDUCES) for rank in range(6)]
    assert sentence_of(stacks, 2) == "rank 2: train.py:41 in next_batch; ranks 0, 1, 3-5: train.py:52 in all_reduce"
    assert sentence_of([RankStack(0, NOTHING, "state S")], None) == ""
    many = [RankStack(rank, (Frame("x.py", rank, "f"),)) for rank in range(5)]
    assert sentence_of(many, None).endswith("; rank 2: x.py:2 in f; others elsewhere (2 places)")


@pytest.mark.parametrize(("ranks", "words"), [([3], "rank 3"), ([0, 1], "ranks 0, 1"), ([4, 0, 1, 2], "ranks 0-2, 4")])
def test_numbers(ranks: list[int], words: str) -> None:
    assert numbers(ranks) == words


def abort(file: Path, text: str) -> list[str]:
    """What a Python program says that gets SIGABRT once it has printed a line."""
    file.write_text(text)
    process = subprocess.Popen([sys.executable, "-u", "-X", "faulthandler", file], stdout=subprocess.PIPE,
                               stderr=subprocess.STDOUT, text=True)
    assert process.stdout is not None
    first = process.stdout.readline()
    time.sleep(0.2)
    process.send_signal(signal.SIGABRT)
    said, _ = process.communicate(timeout=20)
    return [first.rstrip("\n"), *said.splitlines()]


def test_what_sigabrt_makes_python_write(tmp_path: Path) -> None:
    said = abort(tmp_path / "a train.py", "import threading, time\ndef elsewhere():\n    time.sleep(60)\ndef next_batch():\n"
                 "    print('begins')\n    time.sleep(60)\n"
                 "threading.Thread(target=elsewhere, daemon=True).start()\nnext_batch()\n")
    found = aborted(said)
    assert [frame.name for frame in main_thread(found)] == ["next_batch", "<module>"]
    assert str(RankStack(0, main_thread(found))) == "a train.py:6 in next_batch"
    assert before_abort(said) == ["begins"] and "elsewhere" in "".join(found)
    assert aborted(["begins"]) == [] and main_thread([]) == ()


def written(run: RunDirectory, rank: int, lines: Sequence[str]) -> None:
    run.rank_stack(rank).write_text("\n".join(lines))


def test_a_rank_of_several_processes(tmp_path: Path) -> None:
    run = create_run(tmp_path, "x")
    thread = ['Thread 0x7f "other" (most recent call first):', '  File "q.py", line 1 in get', "",
              'Thread 0x7f "MainThread" (most recent call first):', "  Garbage-collecting",
              '  File "/a/train.py", line 41 in load', ""]
    written(run, 1, ["rank 1, pid 7, state S (do_wait): bash train.sh", "",
                     "rank 1, pid 8, state S (futex): python train.py", *thread,
                     "rank 1, pid 9, state S: python worker", *thread[:3]])
    written(run, 0, ["rank 0, pid 6, state D: ./solver"])
    assert [(stack.rank, str(stack), stack.state) for stack in read_stacks(run)] == [
        (0, "no Python frames, its process in state D", "state D"), (1, "train.py:41 in load", "state S (futex)")]


@given(st.lists(st.text(max_size=40), max_size=20))
def test_any_lines(lines: list[str]) -> None:
    main_thread(["Current thread 0x1 (most recent call first):", *lines])
    aborted(["Fatal Python error: Aborted", *lines])


PROGRAMS = table(__file__, "stacks.toml", "programs")


@pytest.mark.parametrize("name", PROGRAMS)
@pytest.mark.parametrize("mark", ["", "[rank3]: "])
def test_what_python_says(name: str, mark: str, tmp_path: Path) -> None:
    program, text, line = PROGRAMS[name]
    file = tmp_path / "a program.py"
    file.write_text(program + "\n")
    said = subprocess.run([sys.executable, file], capture_output=True, text=True).stderr.splitlines()
    found = last_error(["step 1", *(f"{mark}{each}" for each in said), "bye"])
    assert found is not None and found.text.startswith(text) and found.place == f"a program.py{line}"
    assert str(found) == f"{found.text} ({found.place})" and found.traceback.startswith("Traceback")


@pytest.mark.parametrize("lines", table(__file__, "stacks.toml", "no_ends"))
def test_what_is_no_end(lines: list[str]) -> None:
    assert last_error(lines) is None


def test_of_two_the_last_one_and_of_a_broken_last_one_the_first() -> None:
    first = ["Traceback (most recent call last):", '  File "x.py", line 1, in f', "OSError: gone"]
    assert str(last_error([*first, "tries again", *first[:2], "ValueError: last"])) == "ValueError: last (x.py:1)"
    assert str(last_error([*first, *first[:2]])) == "OSError: gone (x.py:1)"


ENDS = tables("program_ends.toml")
TABLE = ENDS["torchrun, a kill"]["log"]
BOOM = [f"[rank3]: {line}" for line in ENDS["parts"]["BOOM"]]


LOST = "RuntimeError: [/x/gloo/transport/tcp/pair.cc:553] Connection closed by peer [10.77.3.12]:23447"


@pytest.mark.parametrize(("second", "blamed", "words"), table(__file__, "stacks.toml", "two_ranks", globals()))
def test_of_several_ranks_of_a_launcher_counts_the_one_that_ended_first(second: str, blamed: int, words: str) -> None:
    other = ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "/home/ann/train.py", line 8, in <module>',
             f"[rank2]: {second}"]
    failures = ["Failures:", "[1]:", f"  rank      : {5 - blamed} (local_rank: 0)"]
    begin = TABLE.index("Root Cause (first observed failure):")
    table = [*TABLE[:begin], *failures, *(line.replace("rank      : 3", f"rank      : {blamed}") for line in TABLE[begin:])]
    found = last_error([*BOOM, *other, *table])
    assert found is not None and found.message == words
