"""Emulated ranks: started right, ended together, nothing left behind."""

import json
import os
import pty
import signal
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

import emulated
import psutil
import pytest
from emulated import ENTRY
from launching import environment, marked, until
from tables import table

from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.watch import RanksEnd
from hpc_mp.launch.emulator.emulator import EmulatedRank, Emulator, Exit
from hpc_mp.rundir import RunDirectory, create_run

# Makes standard input the controlling terminal, so that Ctrl-C written to its other end becomes SIGINT.
ON_TERMINAL = """import fcntl, os, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
os.execv(sys.argv[1], sys.argv[1:])"""


@pytest.fixture
def run(tmp_path: Path) -> RunDirectory:
    return create_run(tmp_path, "job")


def emulate(run: RunDirectory, ranks: int, mark: str, path: Path | None = None, **deeds: str) -> RanksEnd:
    return emulated.emulate(run, ranks, environment(mark, path, **deeds))


def seconds(ended: RanksEnd) -> float:
    """From the first rank's end to the last one's."""
    times = [end.time for end in ended.exits]
    return max(times) - min(times)


def by_rank(ended: RanksEnd) -> dict[int, Exit]:
    return {end.rank: end for end in ended.exits}


# --- a good run -------------------------------------------------------------------------------------------------------


def test_eight_ranks_are_forked_right(run: RunDirectory, mark: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The current directory is not on the path."""
    (tmp_path / "selectors.py").write_text("raise SystemExit('a stranger was imported')\n")
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", ["", *sys.path])
    ended = emulate(run, 8, mark, DEED="tell", SHARED="yes")
    assert {end.rank: end.code for end in ended.exits} == dict.fromkeys(range(8), 0)
    assert ended.broken is None and not ended.interrupted
    told = [json.loads((run.path / f"told-{rank}.json").read_text()) for rank in range(8)]
    for rank, one in enumerate(told):
        assert (one["environ"]["SLURM_PROCID"], one["environ"]["SHARED"], one["cwd"]) == (str(rank), "yes", os.getcwd())
        assert one["sigint"] and one["sigterm"] and one["sigchld"] and not one["torch"]
        log = str(run.rank_log(rank))
        assert [one["fds"][number] for number in "012"] == [os.devnull, log, log] and str(run.lock) in one["fds"].values()
        sockets = [where for where in one["fds"].values() if where.startswith("socket:")]
        assert len(sockets) == (rank == 0) and one["listening"] == (rank == 0)
        shown = (run.path / f"alive-{rank}").read_text().rstrip("\0")
        assert shown.startswith(f"hpc-mp rank {rank} of ") and str(run.path).endswith(shown.partition(" of ")[2]), "to ps"
        assert shown.endswith("/job/0001") and run.rank_log(rank).read_text() == f"rank {rank} lives\n"
    assert len({one["parent"] for one in told}) == 1


@pytest.mark.prove  # in make test ranks of tests/launch/test_submit.py and tests/end_to_end are forked so
def test_ranks_compute_with_the_torch_that_was_imported_once(run: RunDirectory, mark: str) -> None:
    modules = ("torch", "transformers.models.gpt2.modeling_gpt2")
    ended = emulated.emulate(run, 4, environment(mark, DEED="multiply", OMP_NUM_THREADS="2"), modules)
    assert {end.rank: end.code for end in ended.exits} == dict.fromkeys(range(4), 0), run.rank_log(0).read_text()
    for rank in range(4):
        assert run.rank_log(rank).read_text() == f"rank {rank} lives\nsame True, several threads True\n"


def test_the_launcher_has_functions_called_where_the_ranks_modules_are(run: RunDirectory, mark: str) -> None:
    with (Emulator((ENTRY.partition(":")[0],), environment(mark, DEED="tell")) as emulator, open(run.path / ".lock", "w") as lock,
          socket.create_server(("127.0.0.1", 0)) as listener):
        assert emulator.call("emulated:asked", "numbers") == [1, 2.5]
        with pytest.raises(HpcMpError, match=r"a value: a rule\. A remedy\."):
            emulator.call("emulated:asked", "refuse")
        with pytest.raises(RunFailed, match="emulated:asked was killed by SIGSEGV"):
            emulator.call("emulated:asked", "die")
        with pytest.raises(RunFailed, match="KeyError: 'nothing'"):
            emulator.call("emulated:asked", "nothing")
        assert emulator.call("emulated:asked", "left") == "left"
        rank = EmulatedRank(run.rank_log(0), {"SLURM_PROCID": "0", "MASTER_PORT": "1"})
        emulator.start([rank], run.job, listener, lock.fileno(), ENTRY)
        while emulator.running:
            emulator.receive(None)
    assert [end.code for end in emulator.exits] == [0] and emulator.broken is None
    assert "LEFT" not in json.loads((run.path / "told-0.json").read_text())["environ"]  # what a call does leaves nothing behind


def test_a_module_that_cannot_be_imported_is_named(run: RunDirectory, mark: str, tmp_path: Path) -> None:
    (tmp_path / "emulated.py").write_text("import a_library_that_is_not_there\n")
    ended = emulate(run, 2, mark, tmp_path)
    assert ended.exits == ()
    assert ended.broken == ("what ranks need cannot be imported "
                            "(ModuleNotFoundError: No module named 'a_library_that_is_not_there')")
    with (Emulator(("emulated",), environment(mark, tmp_path)) as emulator,
          pytest.raises(RunFailed, match=r"cannot be imported .*a_library_that_is_not_there")):
        emulator.call("emulated:asked", "numbers")


# --- a rank that ends badly ends the others ---------------------------------------------------------------------------


TERMINATED, KILLED = [-signal.SIGTERM, True], [-signal.SIGKILL, True]  # by us
ENDS = table(__file__, "emulator.toml", "ends", globals())


@pytest.mark.parametrize(("deeds", "ends", "first", "least"), ENDS.values(), ids=ENDS)
def test_a_rank_that_ends_badly_ends_the_others(run: RunDirectory, mark: str, deeds: dict[str, str], ends: list[list[Any]],
                                                first: int | None, least: float) -> None:
    """Echoes are collected before anything is killed."""
    ended = emulate(run, len(ends), mark, **deeds)
    assert [[end.code, end.ours] for _, end in sorted(by_rank(ended).items())] == ends
    assert first in (None, min(ended.exits, key=lambda end: end.time).rank)
    assert least < seconds(ended) < 30 and not ended.interrupted and ended.broken is None
    logs = "".join(run.rank_log(rank).read_text() for rank in range(len(ends)))
    assert ("ValueError: boom" in logs) == ("fail" in deeds.values())


# --- a launcher in a process of its own -------------------------------------------------------------------------------


class Launcher:
    """``python emulated.py``, optionally on a terminal of its own."""

    def __init__(self, run: RunDirectory, ranks: int, mark: str, path: Path | None = None, terminal: bool = False,
                 **deeds: str) -> None:
        self.run, self.ranks, self.mark = run, ranks, mark
        command = [sys.executable, emulated.__file__, str(run.path), str(ranks)]
        environ = environment(mark, path, **deeds)
        self.out, self.err = run.path / "out", run.path / "err"
        with open(self.out, "w") as out, open(self.err, "w") as err:
            if terminal:
                self.keyboard, inside = pty.openpty()
                self.process = subprocess.Popen([sys.executable, "-c", ON_TERMINAL, *command], stdin=inside, stdout=out,
                                                stderr=err, env=environ, start_new_session=True)
                os.close(inside)
            else:
                self.process = subprocess.Popen(command, stdout=out, stderr=err, env=environ)

    def wait_for(self, word: str) -> None:
        until(lambda: len(list(self.run.path.glob(f"{word}-*"))) == self.ranks)

    def zygote(self) -> psutil.Process:
        return next(p for p in psutil.Process(self.process.pid).children() if "hpc_mp.launch.emulator.zygote" in p.cmdline())

    def ended(self, seconds: float = 60.0) -> RanksEnd:
        assert self.process.wait(seconds) == 0, self.err.read_text()
        document = json.loads(self.out.read_text())
        return RanksEnd(tuple(Exit(**end) for end in document["exits"]), document["interrupted"], document["broken"])


    def interrupt(self, how: str) -> None:
        if how == "Ctrl-C":
            os.write(self.keyboard, b"\x03")
        else:
            self.process.send_signal(signal.Signals[how])


SELDOM = pytest.mark.prove  # another way into the same path


@pytest.mark.parametrize(("how", "deed", "said"), [
    *(pytest.param(how, "save_and_stop", ["saving at the next step"], marks=marks)
      for how, marks in (("SIGTERM", ()), ("Ctrl-C", ()), ("SIGINT", SELDOM), ("SIGHUP", SELDOM))),
    *(pytest.param(how, "hang_deaf", ["saving", "killed"], marks=marks)
      for how, marks in (("Ctrl-C", ()), ("SIGTERM", SELDOM), ("SIGINT", SELDOM)))])
def test_the_first_interrupt_saves_and_stops_and_the_second_kills(run: RunDirectory, mark: str, how: str, deed: str,
                                                                  said: list[str]) -> None:
    launcher = Launcher(run, 4, mark, terminal=how == "Ctrl-C", DEED=deed)
    launcher.wait_for("ready")
    for words in said:
        launcher.interrupt(how)
        until(lambda words=words: words in launcher.err.read_text())
    ended = launcher.ended()
    code = -9 if "killed" in said else 75
    assert [end.code for end in ended.exits] == [code] * 4 and ended.interrupted
    assert code == 75 or all(end.ours for end in ended.exits)
    assert "KeyboardInterrupt" not in launcher.err.read_text()


@pytest.mark.parametrize(("nohup", "counts"), [(False, (1, 0, 1, 0)), (True, (0, 0, 1, 0))])
def test_a_closed_terminal_never_kills(nohup: bool, counts: tuple[int, ...]) -> None:
    """Kernel and shell may each send a SIGHUP, and it may follow a Ctrl-C; a signal of another kind then does kill."""
    old = signal.signal(signal.SIGHUP, signal.SIG_IGN if nohup else signal.SIG_DFL)
    try:
        with Interrupts() as interrupts:
            for number, count in zip((signal.SIGHUP, signal.SIGHUP, signal.SIGTERM, signal.SIGHUP), counts, strict=True):
                os.kill(os.getpid(), number)
                assert interrupts.received() == count
    finally:
        signal.signal(signal.SIGHUP, old)


@pytest.mark.parametrize("imports", [False, True])
def test_ranks_do_not_outlive_a_killed_launcher(run: RunDirectory, mark: str, tmp_path: Path, imports: bool) -> None:
    """Nor a zygote that still imports."""
    slow = f"import pathlib, time\npathlib.Path({str(run.path)!r}, 'ready-').touch()\ntime.sleep(2)\n"
    (tmp_path / "emulated.py").write_text(slow)
    launcher = Launcher(run, 1 if imports else 4, mark, tmp_path if imports else None, DEED="hang_deaf")
    launcher.wait_for("ready")
    assert imports or len(marked(mark)) == 6
    launcher.process.kill()
    launcher.process.wait()
    until(lambda: not marked(mark))


def test_ranks_do_not_outlive_a_killed_zygote(run: RunDirectory, mark: str) -> None:
    launcher = Launcher(run, 4, mark, DEED="hang_deaf")
    launcher.wait_for("ready")
    launcher.zygote().kill()
    ended = launcher.ended()
    assert ended.exits == () and "was killed by SIGKILL" in (ended.broken or "")
    until(lambda: not marked(mark))


def test_a_rank_killed_from_outside_is_told_apart(run: RunDirectory, mark: str) -> None:
    launcher = Launcher(run, 4, mark, DEED="hang")
    launcher.wait_for("alive")
    sorted(launcher.zygote().children(), key=lambda p: p.pid)[2].kill()
    assert [end.rank for end in launcher.ended().exits if not end.ours] == [2]


def test_the_check_for_left_overs_can_fail(mark: str) -> None:
    with subprocess.Popen(["sleep", "60"], env=environment(mark)) as left:
        assert [process.pid for process in marked(mark)] == [left.pid]
        left.kill()
