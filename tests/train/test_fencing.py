"""How ranks start, stop and give way: identity by place, fences, reasons to stop."""

import dataclasses
import os
import signal
import socket
import time
from collections.abc import Callable
from contextlib import redirect_stderr, redirect_stdout
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st
from layouts import job, start, write_text
from planting import before_steps, planted
from ranks import exit_codes, run_ranks, train

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.placement import Degrees, to_dict
from hpc_mp.layout.placement import place as placed
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, newest_complete, read_json, read_lines, write_attempt, write_json
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.rundir.rank_env import RankEnv, at_place, check_place
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.parallel import communicators
from hpc_mp.train.rank import assemble, main, signals, token_sets
from hpc_mp.train.rank.fencing import Fence, FencedOut, fence
from hpc_mp.train.rank.signals import STOP_FILE, TIME_LIMIT, Pace, StopConditions, StopFlag
from hpc_mp.train.rank.trainer import Trainer

TWO_NODES = ["job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=2"]


# --- identity --------------------------------------------------------------------------------------------------------


@given(st.integers(1, 6), st.integers(1, 4), st.sampled_from(["block", "cyclic"]), st.randoms())
def test_every_place_is_one_rank_whatever_the_hosts_order(nodes: int, per_node: int, rank_map: str, random: Any) -> None:
    placement = placed(Degrees(data=nodes * per_node), "DPT", per_node, rank_map)
    hosts = [f"n{node}" for node in range(nodes)]
    random.shuffle(hosts)
    found = [at_place(placement, hosts, host, local, "Slurm") for host in hosts for local in range(per_node)]
    assert sorted(who.rank for who in found) == list(range(nodes * per_node))
    for who in found:
        assert hosts[placement.ranks[who.rank].node] == who.node
        check_place(placement, who, hosts)


def test_nodes_of_one_host_lie_one_after_the_other() -> None:
    placement = placed(Degrees(data=4), "DPT", 2)
    assert [at_place(placement, ["here", "here"], "here", local, "MPI").rank for local in range(4)] == [0, 1, 2, 3]


@pytest.mark.parametrize(("host", "local"), [("c", 0), ("a", 2)])
def test_a_place_that_no_rank_has_is_refused(host: str, local: int) -> None:
    with pytest.raises(HpcMpError, match=rf"host {host}, local rank {local}.*the hosts are a, b"):
        at_place(placed(Degrees(data=4), "DPT", 2), ["a", "b"], host, local, "Slurm")


def test_a_rank_at_another_place_than_the_placement_says_fails() -> None:
    placement = placed(Degrees(data=4), "DPT", 2)
    for who in (RankEnv(0, 4, 1, "a", "x"), RankEnv(0, 4, 0, "b", "x")):
        with pytest.raises(RuntimeError, match="has local rank"):
            check_place(placement, who, ["a", "b"])
    communicators.check_coordinates(placement, 2)
    wrong = dataclasses.replace(placement, ranks=(*placement.ranks[:2], dataclasses.replace(placement.ranks[2], dp=1)))
    with pytest.raises(RuntimeError, match="dp 1 cp 0 tp 0, its order DPT pp 0 dp 2"):
        communicators.check_coordinates(wrong, 2)


# --- fences ----------------------------------------------------------------------------------------------------------


PORTS: list[socket.socket] = []
"""Bound, so that nobody else gets these ports; but they do not listen, so that a rank can."""


def a_port() -> int:
    free = socket.socket()
    free.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    free.bind(("127.0.0.1", 0))
    PORTS.append(free)
    port: int = free.getsockname()[1]
    return port


def written(run: RunDirectory, token: str = "7.0.1", **more: Any) -> AttemptRecord:
    record = AttemptRecord(token, 3, ("b", "a"), "127.0.0.1", a_port(), "s", **more)
    write_attempt(run.attempt_record, record)
    return record


def test_a_claim_holds_until_another_start_is_written_down(tmp_path: Path) -> None:
    run = RunDirectory(tmp_path)
    written(run)
    mine, record = fence(run, {TOKEN: "7.0.1"})
    assert record is not None and record.attempt == 3 and mine.token == "7.0.1"
    mine.check()
    written(run)  # the same start once more
    mine.check()
    written(run, "7.1.2")
    with pytest.raises(FencedOut, match=r"7\.0\.1.*7\.1\.2"):
        mine.check()
    assert not mine.holds()
    with pytest.raises(FencedOut):
        fence(run, {TOKEN: "7.0.1"})
    run.attempt_record.unlink()
    mine.check()  # a file system that does not answer says nothing
    with pytest.raises(HpcMpError, match="cannot be read here"):
        fence(run, {TOKEN: "7.0.1"})
    assert fence(run, {})[1] is None and fence(None, {TOKEN: "x"})[1] is None and Fence().holds()


# --- ranks as Slurm starts them --------------------------------------------------------------------------------------


def as_slurm(run: RunDirectory, token: str = "7.0.1", before: Callable[[], None] = lambda: None) -> Callable[[], int]:
    """A rank's work: process p is task p % 2 on host a or b, started in an order that is not that of the ranks."""

    def rank() -> int:
        process = int(os.environ["SLURM_PROCID"])
        os.environ.pop("HPC_MP_LISTEN_FD", None)
        os.environ.update({TOKEN: token, "SLURMD_NODENAME": "ba"[process % 2], "SLURM_LOCALID": str(process // 2)})
        with open(run.path / f"said-{process}", "w") as said, redirect_stdout(said), redirect_stderr(said):
            before()
            return train(run.job)

    return rank


def test_ranks_follow_from_hosts_and_not_from_the_order_of_tasks(place: Path) -> None:
    run = start(job(place, "gpt2", TWO_NODES))
    write_json(run.placement, to_dict(placed(Degrees(2, 2, 1), "DPT", 2, (1, 0, 1, 0))))
    written(run)
    assert run_ranks(4, as_slurm(run)) == [0] * 4
    ranks = {line["rank"]: line for line in read_lines(run.ranks)}
    assert [(ranks[rank]["node"], ranks[rank]["local_rank"]) for rank in range(4)] == [("a", 0), ("b", 0), ("a", 1), ("b", 1)]
    assert {(line["attempt"], line["token"], line["device"]) for line in ranks.values()} == {(3, "7.0.1", "cpu")}
    assert {line["attempt"] for line in read_lines(run.metrics)} == {3}
    assert not list(run.log.glob("rank-*")), "srun writes the logs"
    assert "training from step 1" in (run.path / "said-3").read_text()


def test_a_stale_rank_joins_nobody_and_writes_nothing(place: Path) -> None:
    run = start(job(place, "gpt2"))
    written(run, "7.1.2")
    before = sorted(path.name for path in run.path.rglob("*"))
    assert run_ranks(1, as_slurm(run)) == [1]
    said = run.path / "said-0"
    assert "7.0.1" in said.read_text() and "7.1.2" in said.read_text()
    said.unlink()
    assert sorted(path.name for path in run.path.rglob("*")) == before


def again_at(run: RunDirectory, owner: Any, name: str, call: int) -> Callable[[], None]:
    """The run is started again when rank 0 calls a function for that time."""
    calls: list[int] = []

    @planted(owner, name)
    def counted(original: Any, *arguments: Any) -> Any:
        calls.append(0)
        if len(calls) == call:
            written(run, "7.1.2")
        return original(*arguments)

    return counted


@pytest.mark.parametrize(("owner", "name", "call", "steps"), [(Trainer, "_step", 3, 2), (checkpoint, "write_shard", 2, 4)])
def test_a_rank_that_becomes_stale_publishes_nothing_more(place: Path, owner: Any, name: str, call: int, steps: int) -> None:
    run = start(job(place, "gpt2", ["train.steps=6", "checkpoint.every=2"]))
    written(run)
    assert run_ranks(1, as_slurm(run, before=again_at(run, owner, name, call))) == [1]
    assert len(read_lines(run.metrics)) == steps
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000002"]
    assert not list(run.checkpoints.glob(".*")) and not list(run.path.glob("failures/*"))
    assert "7.1.2" in (run.path / "said-0").read_text() and "7.1.2" not in run.main_log.read_text()


def test_without_a_new_start_the_same_run_ends_well(place: Path) -> None:
    """Negative control of the test above."""
    run = start(job(place, "gpt2", ["train.steps=6", "checkpoint.every=2"]))
    written(run)
    assert run_ranks(1, as_slurm(run, before=again_at(run, Trainer, "_step", 100))) == [0]
    assert len(read_lines(run.metrics)) == 6


def test_a_rank_that_lost_another_is_not_called_hung_while_it_lingers(place: Path) -> None:
    """A step has 1 s, and a rank lingers for 4 s."""
    run = start(job(place, "gpt2", ["job.nodes=2", "job.ranks_per_node=1", "job.step_timeout=1"]))
    write_json(run.placement, to_dict(placed(Degrees(data=2), "DPT", 1)))
    written(run)

    def fault(number: int) -> None:
        if number == 1 and os.environ["SLURM_PROCID"] == "1":
            raise RuntimeError("of rank 1")

    assert run_ranks(2, as_slurm(run, before=before_steps(fault))) == [1, 1]
    kinds = {record["message"]: record["kind"] for record in (read_json(run.failure(3, rank)) for rank in range(2))}
    assert kinds.pop("RuntimeError: of rank 1") == "error" and list(kinds.values()) == ["peer"]


# --- reasons to stop -------------------------------------------------------------------------------------------------


def test_the_lookout_sees_file_and_clock(tmp_path: Path) -> None:
    def reason(end: float | None, grace: float, pace: Pace | None = None, trigger: str = "none") -> int:
        flag = StopFlag()
        StopConditions(flag, pace or Pace(), tmp_path / trigger, end, grace).check()
        return flag.reason

    (tmp_path / "stop").touch()
    handlers = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR2)]
    try:
        now = time.time()
        assert reason(None, 0) == reason(now + 10_000, 5_000) == 0
        assert reason(now + 10_000, 10_001) == TIME_LIMIT
        assert reason(now + 10_000, 5_000, Pace(step=1_300, save=2_900)) == 0
        assert reason(now + 10_000, 5_000, Pace(step=1_300, save=3_100)) == TIME_LIMIT
        assert reason(now + 10_000, 10_001, trigger="stop") == STOP_FILE
        flag = StopFlag()
        os.kill(os.getpid(), signal.SIGUSR2)
        flag.set(STOP_FILE)
        assert flag.reason == signal.SIGUSR2, "the first one counts"
    finally:
        for number, handler in zip((signal.SIGTERM, signal.SIGINT, signal.SIGUSR2), handlers, strict=True):
            signal.signal(number, handler)


def ended(run: RunDirectory, codes: list[int]) -> tuple[int, str, str]:
    """How many steps were made, status.json's detail and the last line of the main log of a run that all ranks stopped."""
    assert set(codes) == {75}
    status = read_json(run.path / "status.json")
    assert status["phase"] == "stopped"
    return len(read_lines(run.metrics)), status["detail"], run.main_log.read_text().splitlines()[-1]


def test_the_trigger_file_stops_a_run_between_steps(place: Path) -> None:
    run = start(job(place, "gpt2", ["train.steps=50", "job.ranks_per_node=2"]))

    def trigger(number: int) -> None:
        if number == 2:
            run.stop.touch()

    steps, detail, last = ended(run, exit_codes(2, run.job, before_steps(trigger)))
    assert steps == 4 and detail == "stop file" and f"stopped after step {steps}: stop file" in last
    assert newest_complete(run.checkpoints)[0] == run.checkpoints / f"step-{steps:08d}"


def test_the_clock_stops_a_run_before_the_job_ends(place: Path) -> None:
    run = start(job(place, "gpt2", ["train.steps=100000"]))
    end = time.time() + 10_000
    written(run, end=end, grace=1000.0)

    def steps_of_a_second(number: int) -> None:
        """By a clock on which the seventh step, that of number 6, begins when the grace does."""
        signals.time = SimpleNamespace(time=lambda: end - 1006 + number)  # type: ignore[assignment]

    steps, detail, last = ended(run, run_ranks(1, as_slurm(run, before=before_steps(steps_of_a_second))))
    assert steps == 8 and detail == "time limit" and "time limit" in last, "the step after it is the last one"


def asked_to_stop_in(owner: Any, name: str, number: signal.Signals) -> Callable[[], None]:
    """Rank 1 gets a signal when it calls a function."""
    @planted(owner, name)
    def call(original: Any, *arguments: Any) -> Any:
        if os.environ["SLURM_PROCID"] == "1":
            os.kill(os.getpid(), number)
        return original(*arguments)

    return call


@pytest.mark.parametrize("phase", ["meeting", "tokenizing", "restoring"])
def test_a_stop_before_the_first_step_ends_without_one(tmp_path: Path, phase: str) -> None:
    write_text(tmp_path)
    run = start(job(tmp_path, "gpt2", ["job.ranks_per_node=2"]))

    def while_tokenizing() -> None:
        token_sets.PROGRESS_S = 0.0
        run.stop.touch()

    before = {"meeting": asked_to_stop_in(main, "meet", signal.SIGUSR2), "tokenizing": while_tokenizing,
              "restoring": asked_to_stop_in(assemble, "restore", signal.SIGUSR2)}[phase]
    steps, detail, last = ended(run, exit_codes(2, run.job, before))
    reason = "stop file" if phase == "tokenizing" else "asked to by SIGUSR2"
    assert (steps, detail) == (0, reason) and f"stopped before the first step of this attempt: {reason}" in last
    assert not complete_steps(run.checkpoints) and not list(run.path.glob("failures/*"))
    assert bool(list(run.cache.glob("tokens-*"))) == (phase != "tokenizing"), "tokenizing was broken off"
    run.stop.unlink(missing_ok=True)
    assert exit_codes(2, run.job) == [0, 0], "and the next start goes on"


def test_a_stop_while_a_checkpoint_is_written_completes_it_and_stops(place: Path) -> None:
    run = start(job(place, "gpt2", ["train.steps=9", "checkpoint.every=2", "job.ranks_per_node=2"]))
    codes = exit_codes(2, run.job, asked_to_stop_in(checkpoint, "write_shard", signal.SIGTERM))
    assert ended(run, codes)[:2] == (2, "asked to by SIGTERM")
    assert newest_complete(run.checkpoints)[0] == run.checkpoints / "step-00000002"
