"""Where ranks are told to meet, and who is let in there: ranks of this start alone, whatever a stranger does at their port."""

import multiprocessing
import os
import resource
import signal
import socket
import stat
import threading
import time
from collections.abc import Callable
from contextlib import nullcontext, suppress
from datetime import timedelta
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from ranks import run_ranks

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import AttemptRecord, read_attempt, write_attempt
from hpc_mp.rundir.rank_env import check_open_files, identity
from hpc_mp.train.parallel.collectives import known_to_all
from hpc_mp.train.rank.proof import Intrusion, SignedKeys, digest, proven
from hpc_mp.train.rank.rendezvous import Rendezvous, connect, meet, rendezvous
from hpc_mp.train.rank.signals import EXIT_STOPPED, STOPPING, StopFlag, ending_in

TORCHRUN = {"MASTER_ADDR": "n7", "MASTER_PORT": "29400", "TORCHELASTIC_USE_AGENT_STORE": "True"}


def test_known_hosts_go_before_variables_and_else_the_launcher_says_where() -> None:
    assert rendezvous(AttemptRecord("1.0.1", 1, ("n1",), "n1", 4711, "s"), TORCHRUN) == Rendezvous("n1", 4711, "s")
    record = AttemptRecord("here.8.1", 1, (), "", 4711, "s")
    assert rendezvous(record, TORCHRUN) == Rendezvous("n7", 29400, "s", hosted=False)
    assert rendezvous(record, {"MASTER_PORT": "4711"}) == Rendezvous("127.0.0.1", 4711, "s")
    assert rendezvous(None, {"HPC_MP_SECRET": "s", "SLURM_JOB_ID": "7"}).secret == "s"
    assert rendezvous(None, {"SLURM_JOB_ID": "7"}).secret == "7.0.0"


def test_a_secret_is_for_its_owner_and_is_never_printed(tmp_path: Path) -> None:
    tmp_path.chmod(0o755)
    record = AttemptRecord("1.0.1", 1, ("n1",), "n1", 4711, "hush")
    write_attempt(tmp_path / "attempt.json", record)
    assert stat.S_IMODE((tmp_path / "attempt.json").stat().st_mode) == 0o600
    assert read_attempt(tmp_path / "attempt.json") == record
    assert "hush" not in f"{record} {rendezvous(record, {})}"


def test_a_proof_holds_for_what_it_was_made_for_alone() -> None:
    proof = digest("s", "a", "bc")
    assert proven("s", proof, "a", "bc")
    assert not proven("t", proof, "a", "bc") and not proven("s", proof, "ab", "c") and not proven("s", "é", "a", "bc")


def test_a_key_of_a_stranger_is_not_read() -> None:
    store = dist.HashStore()
    ours = SignedKeys(store, "s")
    ours.set("run directory", "/ours")
    assert ours.get("run directory") == "/ours"
    for written in (b"/theirs", digest("t", "run directory", "/theirs").encode() + b"/theirs",
                    digest("s", "another key", "/ours").encode() + b"/ours", b"\xff"):
        store.set("run directory", written)
        with pytest.raises(Intrusion, match="'run directory' of the ranks' store"):
            ours.get("run directory")


def summed(who: int, world: int, secret: str = "s", timeout: float = 60.0) -> float:
    """What the ranks' all-reduce of ones comes to, after they have met."""
    seat = identity({**os.environ, "SLURM_PROCID": str(who), "SLURM_NTASKS": str(world)})
    where = Rendezvous("127.0.0.1", int(os.environ["MASTER_PORT"]), secret,
                       int(os.environ["HPC_MP_LISTEN_FD"]) if who == 0 else None)
    store, keys = meet(seat, where, timedelta(seconds=timeout))
    host = connect(seat, store, "gloo")
    if who == 0:
        keys.set("said", "by rank 0")
    assert keys.get("said") == "by rank 0"
    return float(known_to_all(torch.ones(1), host).sum())


def stranger(world: int, secret: str) -> None:
    """Somebody who connects to the store, is counted by it, and writes what keys he can think of."""
    with suppress(dist.DistError):  # as a rank would come that waits for the others
        dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, is_master=False, timeout=timedelta(seconds=0.5))
    store = dist.TCPStore("127.0.0.1", int(os.environ["MASTER_PORT"]), world, is_master=False, wait_for_workers=False)
    prefixed = dist.PrefixStore(f"hpc-mp/{digest(secret, 'store')}", store)
    for key in ("said", "all", "rank 1", "own/said", "own/all", "own/rank 1"):
        store.set(key, "by a stranger")
        prefixed.set(key, "by a stranger")


def test_a_stranger_is_neither_counted_nor_heard() -> None:
    gone = multiprocessing.Event()

    def process() -> float | None:
        place = int(os.environ["SLURM_PROCID"])
        if place == 2:
            stranger(2, "guessed")
            return gone.set()
        if place == 1:  # all is written before this rank comes
            gone.wait(90)
        return summed(place, 2)

    assert run_ranks(3, process) == [2.0, 2.0, None]


def test_the_stranger_would_be_heard_if_he_knew_the_secret_but_not_believed() -> None:
    """Negative control: he writes where ranks read, and what he writes has no proof."""
    def process() -> str:
        if os.environ["SLURM_PROCID"] == "1":
            stranger(2, "s")
            return ""
        with pytest.raises((Intrusion, dist.DistError)) as raised:
            summed(0, 2)
        return type(raised.value).__name__

    assert run_ranks(2, process)[0] == "Intrusion"


@pytest.mark.parametrize(("ranks", "enough"), [(2, 66), (128, 192), (1000, 1064)])
def test_rank_0_refuses_a_limit_of_open_files_at_once(ranks: int, enough: int) -> None:
    def process() -> str:
        resource.setrlimit(resource.RLIMIT_NOFILE, (enough - 1, enough - 1))
        with pytest.raises(HpcMpError) as raised:
            summed(0, ranks)
        return str(raised.value)

    (said,) = run_ranks(1, process)
    assert f"(ulimit -Hn = {enough - 1}): is too small" in said and f"Raise it to {enough} or more" in said
    check_open_files(ranks, enough, "here")
    check_open_files(ranks, resource.RLIM_INFINITY, "here")


def a_rank_that_does_not_come() -> None:
    with pytest.raises(dist.DistError):
        store = dist.TCPStore("127.0.0.1", 0, 2, is_master=True, wait_for_workers=False, timeout=timedelta(seconds=60))
        store.wait(["rank 1"], timedelta(seconds=60))


def a_store_that_does_not_answer() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listening:
        dist.TCPStore("127.0.0.1", listening.getsockname()[1], 2, is_master=False, timeout=timedelta(seconds=60))


def a_lock() -> None:
    threading.Lock().acquire()
    threading.Event().wait(60)


def ended_by(number: int, blocked: Callable[[], None], seconds: float | None) -> int | None:
    """The exit code of a process that is told to stop while it waits; None where it goes on waiting for 3 s."""
    pid = os.fork()
    if pid == 0:
        StopFlag()
        with ending_in(seconds) if seconds is not None else nullcontext():
            blocked()
        os._exit(3)
    time.sleep(0.7)
    os.kill(pid, number)
    until = time.monotonic() + (3 if seconds is None else 60)
    while time.monotonic() < until:
        if (ended := os.waitpid(pid, os.WNOHANG))[0]:
            return os.waitstatus_to_exitcode(ended[1])
        time.sleep(0.05)
    os.kill(pid, signal.SIGKILL)
    os.waitpid(pid, 0)
    return None


@pytest.mark.parametrize("blocked", [a_rank_that_does_not_come, a_store_that_does_not_answer, a_lock])
@pytest.mark.parametrize("number", STOPPING)
def test_a_stop_request_ends_a_rank_that_waits_for_the_others(number: signal.Signals, blocked: Callable[[], None]) -> None:
    assert ended_by(number, blocked, 0.1) == EXIT_STOPPED


def test_without_that_the_request_would_not_be_heard() -> None:
    assert ended_by(signal.SIGTERM, a_rank_that_does_not_come, None) is None


def test_a_request_leaves_ranks_the_time_to_meet() -> None:
    assert ended_by(signal.SIGTERM, lambda: time.sleep(1.5), 30.0) == 3


def test_a_rank_of_another_start_is_missed_by_its_number() -> None:
    all_are_there = multiprocessing.Barrier(3)

    def process() -> str:
        place = int(os.environ["SLURM_PROCID"])
        all_are_there.wait(60)
        with pytest.raises(dist.DistError) as raised:
            summed(place, 3, secret="old" if place == 1 else "s", timeout=5.0)
        return str(raised.value)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("hpc_mp.train.rank.rendezvous.LATER", timedelta(seconds=0.5))
        assert run_ranks(3, process)[0] == "2 of 3 ranks came, rank 1 did not in 5 s"
