"""Signs of life between nodes, and of steps within a rank: in threads over real sockets, and with really stopped ranks."""

import os
import signal
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import warm
from hypothesis import given
from hypothesis import strategies as st
from launching import command, environment, mark, until  # noqa: F401  (mark is a fixture)
from layouts import write_job

from hpc_mp.job.spec import Job
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.train.rank import heartbeat_server, watchdog
from hpc_mp.train.rank.failures import Hung, NodeLost
from hpc_mp.train.rank.heartbeat import Client, greeting
from hpc_mp.train.rank.heartbeat_server import BEAT, FAREWELL, NONCE, NodeSilence, Server, suspects
from hpc_mp.train.rank.watchdog import Watchdog

TIMEOUT = 2.4


@given(st.lists(st.floats(0, 100), min_size=1, max_size=8), st.sets(st.integers(0, 7)))
def test_only_nodes_that_are_silent_or_broken_are_suspected(silence: list[float], cut: set[int]) -> None:
    broken = {node for node in cut if node < len(silence)}
    nodes, own = suspects(NodeSilence(dict(enumerate(silence)), broken), 30.0)
    assert bool(nodes) == (bool(broken) or max(silence) >= 30)
    assert all(node in broken or silence[node] > 15 for node in nodes)
    assert own == (bool(nodes) and not broken and len(silence) > 1 and min(silence) > 15)


@dataclass
class Node:
    """A node's part in a thread, and what it says of others."""

    part: Any
    said: list[NodeLost]

    def __post_init__(self) -> None:
        self.port = getattr(self.part, "port", 0)
        self.thread = threading.Thread(target=self.part.run, daemon=True)
        self.thread.start()

    def close(self) -> None:
        if self.thread.is_alive():
            self.part.close()
            self.thread.join(5)


def server(nodes: int) -> Node:
    said: list[NodeLost] = []
    return Node(Server(0, {node: f"n{node}" for node in range(nodes)}, "7.0", TIMEOUT, said.append), said)


def client(to: Node, node: int, token: str = "7.0") -> Node:
    said: list[NodeLost] = []
    return Node(Client(("127.0.0.1", to.port), node, "n0", token, TIMEOUT, said.append), said)


def greeted(to: Node, node: int) -> socket.socket:
    """The connection of a node that has answered the challenge, and then says nothing."""
    connection = socket.create_connection(("127.0.0.1", to.port))
    connection.sendall(greeting("7.0", str(node), connection.recv(NONCE, socket.MSG_WAITALL).decode()))
    return connection


@pytest.mark.parametrize(("nodes", "mute", "named"), [
    (4, [2], ["n2"]), (4, [1, 3], ["n1", "n3"]), (4, [1, 2, 3], ["n0"]), (2, [1], ["n1"]), (4, [], [])])
def test_rank_0_names_exactly_the_silent_nodes(nodes: int, mute: list[int], named: list[str]) -> None:
    first = server(nodes)
    others = [greeted(first, node) if node in mute else client(first, node) for node in range(1, nodes)]
    if named:
        until(lambda: first.said)
        assert first.said[0].facts == {"nodes": tuple(named), "silent": True}
    else:
        time.sleep(4 * TIMEOUT)
        assert first.said == []
    for other in others:
        other.close()
    first.close()
    assert [error for other in others if isinstance(other, Node) for error in other.said] == []


def test_who_breaks_off_is_named_and_who_takes_leave_is_not() -> None:
    first = server(4)
    orderly, staying, broken = client(first, 1), client(first, 2), greeted(first, 3)
    until(lambda: len(first.part.connected) == 3)
    orderly.close()
    broken.close()
    until(lambda: first.said)
    assert first.said[0].facts == {"nodes": ("n3",), "silent": False}
    assert not orderly.said and not staying.said
    staying.close()


def test_a_client_names_the_node_of_rank_0() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        said: list[NodeLost] = []
        other = Node(Client(listener.getsockname(), 1, "n0", "7.0", TIMEOUT, said.append), said)
        connection, _ = listener.accept()
        connection.sendall(b"0" * NONCE)  # and then nothing
        until(lambda: said)
        assert said[0].facts == {"nodes": ("n0",), "silent": True}
        connection.close()
        other.close()


def test_strangers_and_ranks_of_another_start_are_shown_out() -> None:
    first = server(2)
    good = client(first, 1)
    strangers = [client(first, 1, token="6.0"), client(first, 5)]
    with socket.create_connection(("127.0.0.1", first.port)) as scanner:
        scanner.sendall(b"GET / HTTP/1.0\r\n\r\n" * 50)
        time.sleep(2 * TIMEOUT)
    with socket.create_connection(("127.0.0.1", first.port)) as replaying:
        replaying.settimeout(60)
        replaying.recv(NONCE, socket.MSG_WAITALL)
        replaying.sendall(greeting("7.0", "1", "0" * NONCE))  # what a node has once said to another challenge
        assert replaying.recv(1) == b""
    assert first.said == [] and good.thread.is_alive()
    for node in (*strangers, good, first):
        node.close()


def test_a_start_that_takes_long_fools_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    first = server(3)
    early = client(first, 1)
    time.sleep(3 * TIMEOUT)
    late = client(first, 2)
    time.sleep(2 * TIMEOUT)
    assert first.said == early.said == late.said == []
    for node in (early, late, first):
        node.close()
    monkeypatch.setattr(heartbeat_server, "START_S", 0.0)
    first = server(3)
    early = client(first, 1)
    until(lambda: first.said)
    assert first.said[0].facts["nodes"] == ("n2",), "negative control: who never comes is lost"
    early.close()


def test_a_thousand_nodes() -> None:
    """All beat from one selector; the server takes little of a core and loses none."""
    first = server(1001)
    connections: list[socket.socket] = []

    def beat() -> None:
        for connection in connections:
            connection.send(BEAT)

    for node in range(1, 1001):
        connections.append(greeted(first, node))
        if node % 100 == 0:  # on a busy machine the others take longer than a timeout
            beat()
    for _ in range(12):
        time.sleep(TIMEOUT / 6)
        beat()
    assert first.said == []
    for connection in connections:
        connection.send(FAREWELL)
        connection.close()
    first.close()


# --- the step watchdog -----------------------------------------------------------------------------------------------


def barks(feed: Callable[[Watchdog], None], awaited: bool = False, **limits: float) -> list[Hung]:
    """What the watchdog has said once it was fed, or, where it is ``awaited``, once it has said something."""
    said: list[Hung] = []
    every: dict[watchdog.Phase, float] = {"start": 0, "load": 0, "first step": 0, "step": 0, "save": 0}
    with Watchdog(every | limits, said.append) as dog:  # type: ignore[operator]
        feed(dog)
        if awaited:
            until(lambda: said)
    return said


def steps(dog: Watchdog, count: int, seconds: float, phase: watchdog.Phase = "step") -> None:
    for _ in range(count):
        dog.now(phase)
        time.sleep(seconds)


def test_the_watchdog_barks_when_no_step_comes_and_only_then() -> None:
    assert barks(lambda dog: steps(dog, 15, 0.3), step=4.0) == []
    assert barks(lambda dog: steps(dog, 1, 1.0)) == []
    said = barks(lambda dog: steps(dog, 2, 0.1), awaited=True, step=0.3)
    assert len(said) == 1 and "0.3 s" in str(said[0]) and "test_heartbeat.py" in "".join(said[0].__notes__)


@pytest.mark.parametrize(("phase", "said"), watchdog.LATE.items())
def test_every_phase_has_a_limit_of_its_own(phase: watchdog.Phase, said: str) -> None:
    others = {other: 0.2 for other in watchdog.LATE if other not in (phase, "start")}
    assert barks(lambda dog: steps(dog, 1, 0.8, phase), **others, **{phase: 60.0}) == []
    (hang,) = barks(lambda dog: dog.now(phase), awaited=True, **{phase: 0.2})
    assert str(hang).startswith(f"{said} in 0.2 s; the rank stands in ")


def test_the_first_step_may_take_longer() -> None:
    given = watchdog.limits(Job(step_timeout=30, save_timeout=200))
    assert (given["step"], given["first step"], given["save"]) == (30, 90, 200)


# --- real ranks ------------------------------------------------------------------------------------------------------


@pytest.fixture
def job(tmp_path: Path) -> Path:
    return write_job(tmp_path)


def stopped(job: Path, mark: str, rank: int, nodes: int, *overrides: str) -> RunDirectory:  # noqa: F811
    """Launch on emulated nodes of one rank each, send SIGSTOP to one rank in mid-training, wait for the end."""
    started = warm.Program(command(job, [f"job.nodes={nodes}", "train.steps=100000", *overrides])[1:], environment(mark))
    run = RunDirectory(job.parent / "runs" / "exact" / "0001")
    until(lambda: len(read_lines(run.metrics)) >= 2, 120)
    os.kill(next(line["pid"] for line in read_lines(run.ranks) if line["rank"] == rank), signal.SIGSTOP)
    done = started.end(120)
    assert done.returncode == 1, done.stderr
    return run


@pytest.mark.parametrize(("rank", "reporters"), [(2, {0}), (0, {1, 2})])
def test_a_stopped_rank_is_named_by_its_node(job: Path, mark: str, rank: int, reporters: set[int]) -> None:  # noqa: F811
    """Of several that notice it, one may end before another does, which then has lost that one."""
    run = stopped(job, mark, rank, 3, "job.heartbeat_timeout=8")
    failures = [read_json(path) for path in (run.failure(1, reporter) for reporter in reporters) if path.exists()]
    assert ("lost", [f"node{rank}"]) in [(failure["kind"], failure["nodes"]) for failure in failures]
    assert "node" in run.main_log.read_text() and f"node{rank} gave no sign of life for 8 s" in run.main_log.read_text()


def test_a_step_that_never_ends_is_noticed_by_every_rank_that_waits(job: Path, mark: str) -> None:  # noqa: F811
    run = stopped(job, mark, 1, 2, "job.heartbeat_timeout=0", "job.step_timeout=10")
    failure = read_json(run.failure(1, 0))
    assert failure["kind"] == "hang" and "no step was finished in 10 s" in failure["message"]
    assert "Thread 0x" in run.rank_log(0).read_text(), "the stacks of all threads are in the rank's log"
    assert "rank 0 on node0 (dp 0, pp 0, tp 0) failed: Hung" in run.main_log.read_text()
