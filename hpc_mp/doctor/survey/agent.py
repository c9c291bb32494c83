"""The survey agent: one per node, it executes orders, one per line of its standard input, until the input ends.

``python -m hpc_mp.doctor.survey.agent [INTERFACE…]``, as one task per node of a step. It answers on standard output. Between the
GPUs of a pair of nodes it measures with a bench of two ranks for every GPU, both directions at the same time (``sendrecv``).
Every GPU has ranks of its own, so that a dead one costs one rail.
"""

import json
import os
import platform
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict

from hpc_mp.cluster.node.source import here
from hpc_mp.doctor.bench.spec import BenchSpec, dump_spec, events
from hpc_mp.doctor.nccl_log.judge import judge_ports, read_port_bytes
from hpc_mp.doctor.survey.agents import Message, pieces
from hpc_mp.doctor.survey.evidence import compute, counters, node_facts
from hpc_mp.doctor.survey.node_report import REPORTED, node_report
from hpc_mp.doctor.survey.transfer import TransferEnd, TransferPlan, answer, call, listener, probe, start_echo
from hpc_mp.planner.collectives import PLACED
from hpc_mp.rundir import SECRET

PROGRAM = "hpc_mp.doctor.bench.ranks.program"
WARM_UPS = 3


def measure(side: int, address: str, ports: Sequence[int], order: Message, token: str, interface: str) -> list[Message]:
    """Measure every GPU. Return the ends of both directions from side 0, which has the results; from side 1 only failures.
    ``interface``: network interface of this node for the ranks' messages about the measurement."""
    spec = BenchSpec("sendrecv", order["backend"], 2, 1, ((0, 1),), (order["size"],), "float", WARM_UPS, order["messages"], False,
                     order["patience"])
    shared = {"GLOO_SOCKET_IFNAME": interface, **os.environ, "MASTER_ADDR": address, SECRET: token,
              "SLURM_STEP_ID": "0", "SLURM_PROCID": str(side), "SLURM_NTASKS": "2"}  # ranks of the pair, not of the survey's step
    running = [subprocess.Popen([sys.executable, "-P", "-m", PROGRAM, dump_spec(spec)], stdin=subprocess.DEVNULL,
                                stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, errors="replace",
                                env=shared | {"SLURM_LOCALID": str(gpu), "MASTER_PORT": str(port)})
               for gpu, port in enumerate(ports)]
    end = time.monotonic() + order["patience"]
    return [message for gpu, process in enumerate(running) for message in _ends(process, gpu, end)]


def sent(ends: Sequence[Message], gpus: int, order: Message) -> int:
    """Return the bytes that this side has sent to the other, on all GPUs without a failure."""
    failed = {end["rail"] for end in ends if "why" in end}
    return (gpus - len(failed)) * int(order["size"]) * len(PLACED) * (int(order["messages"]) + WARM_UPS)


def _ends(process: subprocess.Popen[str], gpu: int, end: float) -> Iterator[Message]:
    try:
        output, error = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        output, error = "", f"GPU {gpu} did not end in time"
    reports = {report["event"]: report for report in events(output.splitlines())}
    if "refused" in reports:
        error = "{value} {rule}".format(**reports["refused"])
    for direction in (0, 1):
        if process.returncode:
            why = error.strip().splitlines() or [f"exit code {process.returncode}"]
            yield {"rail": gpu, "direction": direction, "why": why[-1]}
        elif "row" in reports:
            seconds, *_ = reports["row"]["ranks"][direction]["out_of_place"]
            yield {"rail": gpu, "direction": direction, "rate": reports["row"]["size"] / seconds}


class Agent:
    """The state of an agent: its rank, its facts, and the addresses of its peers after the order ``meet``."""

    def __init__(self, rank: int, node: str, interfaces: Iterable[str]) -> None:
        self.rank = rank
        self._calls = socket.create_server(("", 0), backlog=64)
        port = self._calls.getsockname()[1]
        start_echo(listener(port))
        self.facts = node_facts(node, tuple(interfaces), port)
        self._token = ""
        self._book: list[tuple[list[str], int]] = []

    def obey(self, order: Message) -> Message | None:
        """Execute an order and return the answer, None if the order is not for this agent."""
        action = ACTIONS[order["do"]]
        reply = action(self, order)
        return None if reply is None else {"id": order["id"], **reply}

    def meet(self, order: Message) -> None:
        """Store the token and the address book: addresses, one per rail, and port, by rank."""
        self._token, self._book = order["token"], order["book"]

    def transfer(self, order: Message) -> Message | None:
        """Transfer in both directions with the peer in ``pairs``."""
        pair = next((pair for pair in order["pairs"] if self.rank in pair), None)
        if pair is None:
            return None
        plan = TransferPlan(self._token, order["id"], order["seconds"], order["patience"], order["streams"], order["packets"])
        mine = [interface.address for interface in self.facts.interfaces]
        if self.rank == pair[1]:
            return {"ends": [*_messages(answer(plan, self._calls, len(mine)))]}
        theirs, port = self._book[pair[1]]
        return {"ends": [*_messages(call(plan, [(source, target, port) for source, target in zip(mine, theirs, strict=True)]))]}

    def probe(self, order: Message) -> Message | None:
        """Send full-size packets on every rail to this agent's peers in ``peers``: {rail: {peer: echoes received}}."""
        peers = order["peers"].get(str(self.rank))
        if peers is None:
            return None
        rails = enumerate(zip(self.facts.interfaces, order["sizes"], strict=True))
        return {"rails": {rail: self._probed(rail, interface.address, peers, size) for rail, (interface, size) in rails}}

    def _probed(self, rail: int, mine: str, peers: list[int], size: int) -> Message:
        targets = [(self._book[peer][0][rail], self._book[peer][1]) for peer in peers]
        return {str(peer): asdict(counts) for peer, counts in zip(peers, probe(mine, targets, size, self._token), strict=True)}

    def report(self, order: Message) -> Message:
        """Return the report of this node, with ``seconds`` of load for its devices."""
        return {"seen": asdict(node_report(self.facts.node, order["seconds"]))}

    def compute(self, order: Message) -> Message | None:
        """Compute for ``seconds`` if ``ranks`` contains this agent."""
        return asdict(compute(order["seconds"])) if self.rank in order["ranks"] else None

    def ports(self, order: Message) -> Message:
        with ExitStack() as stack:  # all at once, so that they differ; they are free at this moment
            listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(order["count"])]
            return {"ports": [listener.getsockname()[1] for listener in listeners]}

    def gpus(self, order: Message) -> Message | None:
        """Transfer between the GPUs of a pair, on ports chosen by its first member, and check that the fast network was used."""
        for one, other, ports in order["pairs"]:
            if self.rank in (one, other):
                side, source = int(self.rank == other), here()
                before = read_port_bytes(source)
                ends = measure(side, self._book[one][0][0], ports, order, self._token, self.facts.interfaces[0].name)
                findings = judge_ports(before, read_port_bytes(source), sent(ends, len(ports), order))
                return {"ends": ends, "found": [asdict(finding) for finding in findings if finding.severity in REPORTED]}
        return None

    def counters(self, order: Message) -> Message:
        return {"counters": counters([interface.name for interface in self.facts.interfaces])}


ACTIONS: dict[str, Callable[[Agent, Message], Message | None]] = {
    "meet": Agent.meet, "report": Agent.report, "transfer": Agent.transfer, "probe": Agent.probe, "compute": Agent.compute,
    "counters": Agent.counters, "ports": Agent.ports, "gpus": Agent.gpus,
}


def _messages(ends: Iterable[TransferEnd]) -> Iterator[Message]:
    """Yield the ends as messages without empty fields: srun carries every byte."""
    for end in ends:
        fields = {name: value for name, value in asdict(end).items() if value and name != "key"}
        yield {"rail": end.key.rail, "direction": end.key.direction, **fields}


def main(interfaces: Iterable[str], environ: Mapping[str, str] = os.environ) -> int:
    """Report this node's facts, then execute orders. Return 0 at the end of input, 1 if there is no interface to measure."""
    rank = int(environ["SLURM_PROCID"])
    node = environ.get("SLURMD_NODENAME", platform.node())
    try:
        agent = Agent(rank, node, interfaces)
    except LookupError as error:
        _say(rank, {"id": 0, "node": node, "error": str(error), "slurm": _slurm(environ)})
        return 1
    _say(rank, {"id": 0, "facts": asdict(agent.facts), "slurm": _slurm(environ)})
    for line in sys.stdin:
        answered = agent.obey(json.loads(line))
        if answered is not None:
            _say(rank, answered)
    return 0


def _slurm(environ: Mapping[str, str]) -> Message:
    """Return Slurm's environment of a task: the cluster, the step's nodes and the switches above this node."""
    address = [environ.get(name, "") for name in ("SLURM_TOPOLOGY_ADDR", "SLURM_TOPOLOGY_ADDR_PATTERN")]
    return {"cluster": environ.get("SLURM_CLUSTER_NAME"), "nodelist": environ.get("SLURM_STEP_NODELIST", ""), "address": address}


def _say(rank: int, message: Message) -> None:
    sys.stdout.write("".join(pieces(rank, message)))
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
