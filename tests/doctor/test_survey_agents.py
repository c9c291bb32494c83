"""Agents and their coordinator, as processes of this machine: what they measure, and that nobody waits for a peer for ever."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from itertools import cycle
from multiprocessing import get_context
from typing import IO, Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.doctor.survey import agents as pool_module
from hpc_mp.doctor.survey import measurements as instruments
from hpc_mp.doctor.survey import transfer as transfers
from hpc_mp.doctor.survey.agents import AgentPool, Joiner, Message, encode, pieces, read
from hpc_mp.doctor.survey.evidence import NodeFacts, SurveyEvidence, compute, node_facts
from hpc_mp.doctor.survey.measurements import GpuMeasurements, Gpus, Measurements
from hpc_mp.doctor.survey.start import AGENT
from hpc_mp.doctor.survey.transfer import HEADER, MARK, TRIES, Probed, TransferPlan, answer, call, listener, probe, start_echo


@dataclass(frozen=True)
class Local:
    """``processes``: one per agent, n0 …"""

    crew: AgentPool
    tools: Measurements
    processes: list[subprocess.Popen[str]]

    @property
    def evidence(self) -> SurveyEvidence:
        return self.tools.evidence


@contextmanager
def agents(count: int, *interfaces: str) -> Iterator[Local]:
    pipe = subprocess.PIPE
    names = ",".join(f"n{rank}" for rank in range(count))
    command = [sys.executable, "-m", AGENT, *(interfaces or ("lo",))]
    slurm = [{"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{rank}", "SLURM_STEP_NODELIST": names} for rank in range(count)]
    processes = [subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | one)
                 for one in slurm]
    try:
        with AgentPool(processes) as crew:
            hellos = crew.assemble(lambda _: count, 60.0, lambda _: None)
            facts = {rank: read(NodeFacts, hello["facts"]) for rank, hello in sorted(hellos.items())}
            evidence = SurveyEvidence(tuple(one.node for one in facts.values()), tuple(facts.values()))
            yield Local(crew, Measurements(crew, list(facts), evidence), processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()


def test_pairs_measure_both_directions_at_the_same_time(monkeypatch: pytest.MonkeyPatch) -> None:
    with agents(4) as local:
        orders = list[dict[str, Any]]()
        order = local.crew.order
        monkeypatch.setattr(local.crew, "order", lambda given, *rest: (orders.append(given), order(given, *rest))[1])
        samples = local.tools.bandwidth([(0, 1), (2, 3)])
        assert [each["pairs"] for each in orders] == [[[0, 1], [2, 3]]]
        assert [(sample.pair, sample.rail) for sample in samples] == [((0, 1), 0), ((2, 3), 0)]
        legs = local.evidence.legs
        assert {(leg.sender, leg.receiver) for leg in legs} == {(0, 1), (1, 0), (2, 3), (3, 2)}
        assert all(leg.rate and leg.rate > 0.05 and leg.segments and not leg.why for leg in legs)
        assert [sample.rate for sample in samples] == [min(leg.rate or 0 for leg in legs[first : first + 2]) for first in (0, 2)]


def test_a_paced_transfer_sends_little() -> None:
    with agents(2) as local:
        legs = local.tools.paced([(0, 1)])
        assert all(leg.paced and 0 < leg.segments < 3 * instruments.PACKETS[1] and leg.lost == 0 for leg in legs)
        assert local.evidence.legs == legs


@pytest.mark.parametrize("fate", [signal.SIGSTOP, signal.SIGKILL])
def test_a_peer_that_hangs_or_dies_costs_one_round(fate: signal.Signals) -> None:
    with agents(4) as local:
        local.processes[3].send_signal(fate)
        begin = time.monotonic()
        samples = local.tools.bandwidth([(0, 1), (2, 3)])
        assert time.monotonic() - begin < 60
        assert samples[0].rate is not None and samples[1].rate is None
        assert {leg.why for leg in local.evidence.legs if leg.pair == (2, 3)} == {"no answer from the agent"}
        assert local.tools.bandwidth([(0, 2)])[0].rate is not None
        local.processes[3].kill()


def test_gpus_are_measured_one_by_one_both_ways(monkeypatch: pytest.MonkeyPatch) -> None:
    """Over gloo, as there is no second GPU here: the same program, processes and answers as over NCCL."""
    monkeypatch.setattr(instruments, "GPU_PATIENCE_S", 240.0)
    with agents(2) as local:
        tools = GpuMeasurements(local.crew, (0, 1), local.evidence, Gpus(2, "gloo", size=1 << 20, messages=3))
        samples = tools.bandwidth([(0, 1)])
        assert [(sample.pair, sample.rail) for sample in samples] == [((0, 1), 0), ((0, 1), 1)]
        assert all(sample.rate is not None and sample.rate > 0.001 for sample in samples), local.evidence.legs
        assert [(leg.sender, leg.rail) for leg in local.evidence.legs] == [(0, 0), (1, 0), (0, 1), (1, 1)]


def test_a_gpu_that_is_not_there_costs_its_rail(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(instruments, "GPU_PATIENCE_S", 240.0)
    count = torch.cuda.device_count()
    with agents(2) as local:
        tools = GpuMeasurements(local.crew, (0, 1), local.evidence, Gpus(count + 1, "nccl", size=1 << 20, messages=3))
        assert tools.bandwidth([(0, 1)])[-1].rate is None
        assert all(f"this is local rank {count}" in leg.why for leg in local.evidence.legs[-2:]), local.evidence.legs


def test_agents_end_with_the_coordinator(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "END_S", 60.0)
    with agents(2) as local:
        processes = local.processes
    assert [process.poll() for process in processes] == [0, 0]


def test_an_interface_that_is_not_there() -> None:
    process = subprocess.run([sys.executable, "-m", AGENT, "ib7"], stdin=subprocess.DEVNULL, text=True, capture_output=True,
                             env=os.environ | {"SLURM_PROCID": "0"})
    assert process.returncode == 1 and "no interface ib7 with an IPv4 address; there are " in process.stdout


def test_facts_survive_the_way() -> None:
    facts = node_facts("localhost", ("lo",), 7)
    assert read(NodeFacts, asdict(facts)) == facts and facts.interfaces[0].address == "127.0.0.1" and facts.cpus >= 1


def test_who_does_not_know_the_token_is_not_served() -> None:
    plan = TransferPlan("right-right-righ", 5, seconds=0.1, patience=30.0)
    with socket.create_server(("127.0.0.1", 0)) as server:
        port, ends = server.getsockname()[1], []
        serving = threading.Thread(target=lambda: ends.extend(answer(plan, server, 1)))
        serving.start()
        for token, order in ((b"wrong-wrong-wron", 5), (b"right-right-righ", 4)):
            with socket.create_connection(("127.0.0.1", port)) as stranger:
                stranger.sendall(HEADER.pack(token, order, 0, 0, 0))
                assert stranger.recv(1) == b""
        called = call(plan, [("127.0.0.1", "127.0.0.1", port)])
        serving.join()
    assert not any(end.why for end in (*called, *ends)) and len(called) == len(ends) == 2


def test_a_call_that_never_comes_ends() -> None:
    begin = time.monotonic()
    with socket.create_server(("127.0.0.1", 0)) as server:
        ends = answer(TransferPlan("x" * 16, 1, seconds=0.1, patience=0.3), server, rails=2)
    assert {end.why for end in ends} == {"no call came"} and len(ends) == 4
    assert time.monotonic() - begin < 30


@contextmanager
def answering(echo: Callable[[socket.socket], None]) -> Iterator[int]:
    """Yield a port at which another process answers. A thread would stay in ``recvfrom`` after its socket is closed. Linux
    restarts that call by the number of the file, which may be another file's by then: the thread takes what a rank has sent."""
    with listener(0) as server:
        process = get_context("fork").Process(target=echo, args=(server,))
        process.start()
        try:
            yield server.getsockname()[1]
        finally:
            process.kill()
            process.join()


def test_probes_tell_a_small_mtu_from_a_dead_path(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(transfers, "LAST_S", 5.0)
    with answering(_echo) as whole, answering(_echo_small) as small, listener(0) as dead:
        seen = probe("127.0.0.1", [("127.0.0.1", port) for port in (whole, small, dead.getsockname()[1])], 1500, "x" * 16)
    assert seen == [Probed(TRIES, TRIES), Probed(TRIES, 0), Probed(0, 0)]


def _echo(server: socket.socket) -> None:
    start_echo(server)
    signal.pause()


def _echo_small(server: socket.socket) -> None:
    """As ``start_echo``, behind a link that takes no packet beyond 1,000 bytes."""
    while True:
        packet, peer = server.recvfrom(65536)
        if len(packet) <= 1000:
            server.sendto(packet[: MARK.size], peer)


def test_a_throttled_process_computes_little_and_the_same() -> None:
    free = compute(0.4)
    program = "from hpc_mp.doctor.survey.evidence import compute; c = compute(1.0); print(c.share, c.digest)"
    process = subprocess.Popen([sys.executable, "-c", program], stdout=subprocess.PIPE, text=True)
    for number, seconds in cycle(((signal.SIGSTOP, 0.09), (signal.SIGCONT, 0.01))):
        if process.poll() is not None:
            break
        process.send_signal(number)
        time.sleep(seconds)
    assert process.stdout is not None
    share, digest = process.stdout.read().split()
    assert float(share) < 0.4 and digest == free.digest


def test_words_of_others_are_kept(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(pool_module, "DRAIN_S", 60.0)
    pipe = subprocess.PIPE
    words = ["sh", "-c", "echo welcome; echo srun: queued >&2; sleep 0.2"]
    process = subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)
    heard: list[str] = []
    with AgentPool([process]) as crew:
        assert crew.assemble(lambda _: 1, 1.0, heard.append) == {}
        assert not crew.alive
    assert crew.words == ["srun: queued"]


def test_the_last_words_of_a_process_are_heard_though_it_has_ended(monkeypatch: pytest.MonkeyPatch) -> None:
    overhear = AgentPool._overhear

    def late(self: AgentPool, lines: IO[str]) -> None:
        time.sleep(0.3)
        overhear(self, lines)

    monkeypatch.setattr(AgentPool, "_overhear", late)
    monkeypatch.setattr(pool_module, "DRAIN_S", 60.0)
    pipe = subprocess.PIPE
    words = [sys.executable, "-c", "import sys; sys.exit('the last words')"]
    with AgentPool([subprocess.Popen(words, stdin=pipe, stdout=pipe, stderr=pipe, text=True)]) as pool:
        assert pool.assemble(lambda _: 1, 60.0, lambda _: None) == {}
    assert pool.words == ["the last words"]


texts = st.text(max_size=3000)


@given(st.lists(st.dictionaries(texts, texts, max_size=4), min_size=1, max_size=5), st.randoms())
def test_messages_survive_srun(messages: list[Message], dice: random.Random) -> None:
    waiting = {rank: [*pieces(rank, message)] for rank, message in enumerate(messages)}
    joiner, heard = Joiner(), {}
    while waiting:
        rank = dice.choice([*waiting])
        line = waiting[rank].pop(0)
        assert line.endswith("\n") and line.count("\n") == 1 and len(line.encode()) < 1024
        if not waiting[rank]:
            del waiting[rank]
        whole = joiner.add(line)
        assert joiner.add("a prolog says hello\n") is None
        if whole:
            heard[whole[0]] = whole[1]
    assert heard == dict(enumerate(messages))


@given(texts)
def test_words_of_others_are_no_messages(line: str) -> None:
    joiner = Joiner()
    for word in line.splitlines() or [""]:
        assert joiner.add(word) is None


def test_a_torn_message_is_dropped() -> None:
    first, *_ = pieces(3, {"id": 1, "long": "x" * 2000})
    joiner = Joiner()
    assert joiner.add(first) is None
    assert joiner.add("hpc-mp-survey 3 .!") is None
    assert joiner.add(next(pieces(3, {"id": 2}))) == (3, {"id": 2})


def test_an_order_is_one_line() -> None:
    assert json.loads(encode({"do": "x", "pairs": [[0, 1]]})) == {"do": "x", "pairs": [[0, 1]]}
    assert encode({"text": "a\nb"}).count("\n") == 1
