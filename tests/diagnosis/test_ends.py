"""What a rank's end was, by its code and its last words, as programs have them: what counts, and what only looks like it."""

import re
import tomllib
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st
from recorded_ends import tables

from hpc_mp.diagnosis.ends import awaited_in_vain, given_up, words_of_end
from hpc_mp.rundir.attempt import last_words, tail

ENDS = tables("program_ends.toml")
PARTS = ENDS.pop("parts")
BOOM, RAISE, HEAD, DIRECT, [GONE] = (PARTS[name] for name in ("BOOM", "RAISE", "HEAD", "DIRECT", "GONE"))


@pytest.mark.parametrize("name", ENDS)
def test_of_a_program(name: str) -> None:
    end = ENDS[name]
    found = words_of_end(end["log"], end["code"], program=True)
    assert found.kind == end["kind"] and end["words"] in found.text, found


LAUNCHERS = {name: end for name, end in tables("launcher_ends.toml").items() if name != "parts"}


@pytest.mark.parametrize("name", LAUNCHERS)
def test_of_a_launcher(name: str) -> None:
    end = LAUNCHERS[name]
    symptom = words_of_end(end["log"], end["code"], program=True, of_node=end.get("of_node", False))
    assert (symptom.kind, symptom.inner) == (end["kind"], end.get("inner")), symptom


TEXTS = tomllib.loads((Path(__file__).parents[1] / "golden" / "diagnosis" / "exceptions.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("kind", "text"), [(kind, text) for kind, texts in TEXTS.items() for text in texts.splitlines()])
def test_what_an_exception_speaks_of(kind: str, text: str) -> None:
    found = words_of_end([*RAISE, text], 1, program=True)
    assert found.kind == kind and text[:60] in found.text


def torchruns(code: int) -> list[str]:
    """The table of torchrun when rank 3 has ended with this code."""
    return [*PARTS["TABLE"], f"  exitcode  : {code} (pid: 4711)", *PARTS["END OF TABLE"]]


@pytest.mark.parametrize(("code", "kind", "words"), [
    (-9, "signal", "was killed by SIGKILL"), (-11, "crash", "was killed by SIGSEGV"), (4, "exit", "ended with exit code 4")])
def test_of_a_launcher_of_a_nodes_ranks(code: int, kind: str, words: str) -> None:
    found = words_of_end(torchruns(code), 1, program=True, of_node=True)
    assert found.kind == kind and found.text.startswith(f"lost its rank 3, which {words}") and found.inner == 3
    mine = words_of_end([*BOOM, *torchruns(1)], 1, program=True, of_node=True)
    assert (mine.kind, mine.text) == ("error", "ValueError: boom (train.py:7), reported by its rank 3")


def test_of_our_own_engine_a_crash_is_the_machines() -> None:
    assert words_of_end(["step 7"], -11).kind == "signal" and words_of_end([], 139).kind == "exit"


@pytest.mark.parametrize(("lines", "kind"), [
    (["step 1", *BOOM], "error"), (["Exception in thread Thread-1 (work):", *BOOM], "error"),
    ([*BOOM, "step 2", "step 3", "step 4", "step 5"], None),
    ([*RAISE, GONE], None), ([*HEAD, GONE, *DIRECT, *BOOM], None), (["step 1"], None)])
def test_what_a_rank_has_failed_of_that_lives_on(lines: list[str], kind: str | None) -> None:
    found = given_up(lines)
    assert (found and found.kind) == kind and (found is None or "it was still running when the others were ended" in found.text)


UNIQUE = ("torch.distributed.DistBackendError: [{}] is setting up NCCL communicator and retrieving ncclUniqueId from [0] via "
          "c10d key-value store by key '0', but store->get('0') got error: Socket Timeout")
SILENT = "RuntimeError: another task died. UNAVAILABLE: The following tasks are unhealthy (stopped sending heartbeats):"
WAITED = "RuntimeError: Timed out waiting 6000ms for recv operation to complete"
BARRIER = "RuntimeError: [Rank 0]: Ranks 2 failed to pass monitoredBarrier in 5000 ms"


@pytest.mark.parametrize(("complaints", "rank"), [
    ({0: WAITED, 1: WAITED, 3: WAITED}, 2), ({0: GONE, 1: WAITED, 3: GONE}, 2), ({0: GONE, 1: GONE, 3: GONE}, None),
    ({0: BARRIER, 1: GONE, 3: GONE}, 2), ({0: f"{BARRIER}, a timeout"}, 2),
    ({0: SILENT, 1: SILENT, 3: SILENT}, 2), ({0: SILENT, 1: SILENT}, None),
    ({0: WAITED, 1: WAITED}, None), ({1: UNIQUE.format(1), 3: UNIQUE.format(3)}, 0), ({1: UNIQUE.format(0)}, None),
    (dict.fromkeys(range(4), WAITED), None), ({}, None)])
def test_for_whom_all_others_have_waited(complaints: dict[int, str], rank: int | None) -> None:
    found = awaited_in_vain(complaints, range(4))
    assert (found and found[0]) == rank
    if found is not None:
        assert re.search(r"gave up waiting for it: (torch\.\S+|Runtime)Error: ", found[1]) and found[1].startswith("rank")


@pytest.mark.parametrize(("lines", "words"), [
    (["step 3", "error: no space", "step 4"], "error: no space"), (["WARNING: cannot find apex", "step 4"], "step 4"),
    (["error: old", *map(str, range(20))], "19"), (["a", "=====", ""], "a"), ([], ""),
    (["boom", "[rank2]:[W1125 ProcessGroupNCCL.cpp:1538] Warning: destroy_process_group() was not called"], "boom")])
def test_last_words(lines: list[str], words: str) -> None:
    assert last_words(lines) == words


def test_what_a_progress_bar_wrote_over_is_not_read(tmp_path: Path) -> None:
    (tmp_path / "log").write_bytes(b"x\r\n 1%\r 2%\r 3%\nGr\xf6\xdfe\xff\n" + "a\u2028b\n".encode() + b"y" * 300_000 + b"\nlast")
    found = tail(tmp_path / "log")
    assert found[:4] == ["x", " 3%", "Gr\ufffd\ufffde\ufffd", "a\u2028b"] and found[-1] == "last"


LINES = st.one_of(st.text(max_size=30), st.sampled_from(sorted({line for part in PARTS.values() for line in part})))


@given(st.lists(LINES, max_size=30), st.integers(-64, 255), st.booleans())
def test_any_lines(lines: list[str], code: int, of_node: bool) -> None:
    assert words_of_end(lines, code, program=True, of_node=of_node).text or code == 0
    given_up(lines)
