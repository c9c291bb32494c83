"""What a rank's last lines say of its end: tracebacks as Python and torch write them, and what only looks like one."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from recorded_ends import tables

from hpc_mp.diagnosis.tracebacks import last_error

PROGRAMS = {
    "plain": ("raise ValueError('no such column')", "ValueError: no such column", ":1"),
    "in a function": ("def f():\n    x = 1\n    return x / 0\nf()", "ZeroDivisionError: division by zero", ":3"),
    "without a word": ("raise KeyError", "KeyError", ":1"),
    "in a library": ("import json\njson.loads('{')", "json.decoder.JSONDecodeError: Expecting property name", ":2"),
    "after another": ("try:\n    1 / 0\nexcept Exception:\n    raise RuntimeError('second')", "RuntimeError: second", ":4"),
    "of its own": ("class Oops(Exception): ...\nraise Oops('x')", "Oops: x", ":2"),
    "several lines": ("raise RuntimeError('CUDA error\\nsecond line')", "RuntimeError: CUDA error", ":1"),
}


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


@pytest.mark.parametrize("lines", [
    [], ["ValueError: not behind a traceback"], ["Traceback (most recent call last):"],
    ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "    cut off"],
    ["Traceback (most recent call last):", '  File "x.py", line 1, in <module>', "what is this?"],
])
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


@pytest.mark.parametrize(("second", "blamed", "words"), [
    (LOST, 3, "ValueError: boom (train.py:7), reported by its rank 3"),  # recorded on two nodes: rank 2 noticed rank 3's end
    (LOST, 2, "ValueError: boom (train.py:7), reported by its rank 3"),
    ("KeyError: 'x'", 3, "ValueError: boom (train.py:7), reported by its rank 3"),
    ("KeyError: 'x'", 2, "KeyError: 'x' (train.py:8), reported by its rank 2")])
def test_of_several_ranks_of_a_launcher_counts_the_one_that_ended_first(second: str, blamed: int, words: str) -> None:
    other = ["[rank2]: Traceback (most recent call last):", '[rank2]:   File "/home/ann/train.py", line 8, in <module>',
             f"[rank2]: {second}"]
    failures = ["Failures:", "[1]:", f"  rank      : {5 - blamed} (local_rank: 0)"]
    begin = TABLE.index("Root Cause (first observed failure):")
    table = [*TABLE[:begin], *failures, *(line.replace("rank      : 3", f"rank      : {blamed}") for line in TABLE[begin:])]
    found = last_error([*BOOM, *other, *table])
    assert found is not None and found.message == words
