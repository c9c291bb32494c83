"""How checks are run: whatever hangs, stumbles or is not there, an answer comes in time and nothing is left behind."""

import functools
import json
import os
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psutil
import pytest
from machines.tree import HANGS, broken

from hpc_mp.cluster.node import deadline, processes
from hpc_mp.cluster.node.counters import read_changes
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.processes import read_processes
from hpc_mp.cluster.node.source import NodeSource, Unavailable, here, keep
from hpc_mp.doctor.checks.check import Check, Judgement, run


def content(facts: Any) -> list[Judgement]:
    return [Judgement("ok", str(facts))]


def test_what_hangs_is_incomplete_within_the_deadline_and_the_others_are_not() -> None:
    source = broken("ethernet", {"/hung": HANGS, "nvidia-smi": HANGS, "/fine": "7"})
    checks = [Check("file", lambda s: s.text("/hung"), content), Check("fine", lambda s: s.number("/fine"), content),
              Check("program", lambda s: s.answer(["nvidia-smi"]), content)]
    begin = time.monotonic()
    found = run(checks, source, 10.0)
    assert time.monotonic() - begin < 60
    assert [(each.code, each.severity) for each in found] == [("file", "unknown"), ("fine", "ok")]
    assert found[0].message == "no answer within 10 s (so too program)"


def test_checks_that_cannot_see_for_one_reason_are_one_finding() -> None:
    def cannot(code: str, why: str) -> Check[Any]:
        return Check(code, lambda s: s.text(why), content)

    def error(facts: str) -> list[Judgement]:
        return [Judgement("error", "/two: No such file or directory: it is gone")]

    checks = [cannot("a", "/one"), cannot("b", "/two"), cannot("c", "/one"), Check("error", lambda s: "", error),
              cannot("d", "/one"), cannot("e", "/three")]
    found = run(checks, broken("ethernet", {}), 60.0)
    assert [(each.code, each.message) for each in found] == [
        ("a", "/one: No such file or directory (so too c, d)"), ("error", "/two: No such file or directory: it is gone"),
        ("e", "/three: No such file or directory")]


def test_what_stumbles_costs_one_check() -> None:
    def halting(facts: int) -> Iterator[Judgement]:
        yield Judgement("ok", "so far")
        raise ValueError("what is this?")
    def one(source: NodeSource) -> int:
        return 1
    checks = [Check("reader", lambda s: 1 // 0, content), Check("half", one, halting), Check("whole", one, content),
              Check("absent", lambda s: s.text("/no/such"), content)]
    found = run(checks, broken("ethernet", {}), 60.0)
    assert [(each.code, each.severity) for each in found] == [
        ("reader", "unknown"), ("half", "unknown"), ("whole", "ok"), ("absent", "unknown")]
    assert "ZeroDivisionError" in found[0].message and "what is this?" in found[1].message
    assert found[3].message == "/no/such: No such file or directory"


def test_checks_of_one_reader_share_one_reading() -> None:
    read: list[int] = []

    def reader(source: NodeSource) -> int:
        read.append(1)
        return len(read)
    found = run([Check(code, reader, content) for code in ("a", "b", "c")], NodeSource(), 60.0)
    assert [each.message for each in found] == ["1", "1", "1"]


def test_the_remedy_of_a_check_stands_in_for_a_findings_own() -> None:
    def judge(facts: int) -> list[Judgement]:
        return [Judgement("ok", ""), Judgement("error", ""), Judgement("warning", "", fix="own")]

    found = run([Check("x", lambda s: 1, judge, remedy="general")], NodeSource(), 60.0)
    assert [each.fix for each in found] == ["", "general", "own"]


def test_nothing_is_left_of_a_child_and_of_what_it_started(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(deadline, "_GRACE_S", 60.0)

    def start() -> None:
        with (tmp_path / "pid").open("w") as file:
            print(subprocess.Popen(["sleep", "100"]).pid, file=file)
        time.sleep(100)
    before = set(psutil.Process().children())
    assert isinstance(in_time({"x": start}, 10.0)["x"], Unavailable)
    assert set(psutil.Process().children()) <= before
    pid = int((tmp_path / "pid").read_text())
    assert not Path(f"/proc/{pid}").exists() or "(sleep) Z" in Path(f"/proc/{pid}/stat").read_text()


def test_nothing_is_left_of_a_child_that_has_hardly_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine it may not lead its session yet when the time is over."""
    monkeypatch.setattr(os, "setsid", lambda: time.sleep(100))
    monkeypatch.setattr(deadline, "_GRACE_S", 60.0)
    before = set(psutil.Process().children())
    assert isinstance(in_time({"x": lambda: 1}, 0.2)["x"], Unavailable)
    assert set(psutil.Process().children()) <= before


def test_what_an_earlier_reading_left_hanging_is_not_tried_again(tmp_path: Path) -> None:
    """A process in the kernel's hands cannot be had in a test; one that is simply there stands for it."""
    left = tmp_path / "hung.json"
    with subprocess.Popen(["sleep", "100"], start_new_session=True) as hung:
        born = Path(f"/proc/{hung.pid}/stat").read_text().rpartition(")")[2].split()[19]
        left.write_text(json.dumps({"x": [hung.pid, born], "other": [hung.pid, born]}))
        found = in_time({"x": lambda: 1, "y": lambda: 2}, 60.0, left)
        assert str(found["x"]) == f"an earlier reading still hangs in process {hung.pid}" and found["y"] == 2
        left.write_text(json.dumps({"x": [hung.pid, "1"]}))
        assert in_time({"x": lambda: 1}, 60.0, left) == {"x": 1}, "a later process has that number"
        left.write_text(json.dumps({"x": [hung.pid, born]}))
        hung.kill()
    assert in_time({"x": lambda: 1}, 60.0, left) == {"x": 1}
    assert json.loads(left.read_text()) == {}


def test_readers_that_have_ended_are_no_zombies_of_the_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    """Those of another doctor neither: hosts of a lab see each other's processes."""
    read = functools.partial(read_processes, NodeSource())
    other_doctor = "import os, time\nfor _ in range(23):\n    if os.fork() == 0:\n        os._exit(0)\ntime.sleep(60)"
    with subprocess.Popen([sys.executable, "-c", other_doctor]) as doctor:
        while len(dead := [each.pid for each in psutil.Process(doctor.pid).children() if each.status() == "zombie"]) < 23:
            time.sleep(0.01)
        found = in_time({"another reader": read}, 60)["another reader"]
        monkeypatch.setattr(processes, "_SETTLED_S", 0.0)
        old = read()
        doctor.kill()
    assert not isinstance(found, Unavailable) and not {each.pid for each in found.zombies} & {*dead}
    assert {each.pid for each in old.zombies} >= {*dead}, "they are zombies once they are old"


@pytest.mark.parametrize("text", ["", "{", "[]", "null", '{"x": 3}', '{"x": [1]}'])
def test_a_spoilt_note_is_no_obstacle(tmp_path: Path, text: str) -> None:
    (tmp_path / "hung.json").write_text(text)
    assert in_time({"x": lambda: 1}, 60.0, tmp_path / "hung.json") == {"x": 1}


def test_of_a_recorded_machine_nothing_is_kept_and_two_readings_are_taken(tmp_path: Path) -> None:
    assert keep(NodeSource(tmp_path), "x") is None
    found = read_changes(broken("ethernet", {"/proc/uptime": "100.0 1.0"}))
    assert found.grown["net/eno1/rx_crc_errors"] == 0 and found.seconds == 0


def test_counters_that_were_reset_or_are_new_did_not_grow() -> None:
    state = {"boot": broken("ethernet", {}).text("/proc/sys/kernel/random/boot_id"),
             "readings": [{"at": 10.0, "values": {"net/eno1/rx_packets": 9_000_000, "net/eno1/tx_packets": 1}}]}
    edits = {"/run/hpc-mp/counters.json": json.dumps(state), "/proc/uptime": "110.0 1.0"}
    found = read_changes(broken("ethernet", edits))
    assert found.seconds == 100 and found.grown == {"net/eno1/tx_packets": 4_999_999}
    old = dict(edits, **{"/proc/uptime": "90000.0 1.0"})
    assert read_changes(broken("ethernet", old)).seconds == 0, "a reading older than three hours is not used"


FREEZER = Path("/sys/fs/cgroup/freezer")


@pytest.mark.skipif(not os.access(FREEZER / "tasks", os.W_OK), reason="needs root and the freezer of cgroups version 1")
def test_a_process_that_the_kernel_does_not_let_go_is_left_behind_once(tmp_path: Path) -> None:
    """A frozen process does not die of SIGKILL, as one that waits for a dead file server."""
    group, left, runs = FREEZER / f"hpc-mp-{os.getpid()}", tmp_path / "hung.json", tmp_path / "runs"
    group.mkdir()

    def hangs() -> None:
        with runs.open("a") as file:
            file.write("x")
        (group / "tasks").write_text(str(os.getpid()))
        (group / "freezer.state").write_text("FROZEN")
        time.sleep(100)
    try:
        begin = time.monotonic()
        assert str(in_time({"x": hangs}, 10.0, left)["x"]) == "no answer within 10 s"
        for _ in range(3):
            assert "still hangs in process" in str(in_time({"x": hangs}, 10.0, left)["x"])
        assert time.monotonic() - begin < 60 and runs.read_text() == "x", "one process, however often it is looked"
        (group / "freezer.state").write_text("THAWED")
        time.sleep(0.3)
        while (group / "tasks").read_text():
            time.sleep(0.05)
        os.waitpid(json.loads(left.read_bytes())["x"][0], 0)
        assert in_time({"x": lambda: 1}, 60.0, left) == {"x": 1}
    finally:
        (group / "freezer.state").write_text("THAWED")
        group.rmdir()


def test_programs_of_root_are_found_and_speak_english() -> None:
    source = here({"PATH": "/nowhere", "LANG": "de_DE.UTF-8"})
    assert source.answer(["env"]).count("LC_ALL=C\n") == 1
    assert source.answer(["sh", "-c", "echo $PATH"]).startswith("/nowhere:/usr/local/sbin:/usr/sbin")
