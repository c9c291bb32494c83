"""The agent's part of a measurement between the GPUs of a pair of nodes: one process per GPU."""

from __future__ import annotations

import json
import socket
import subprocess
import sys
import time
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict

from hpc_mp.doctor.survey.agents import Message
from hpc_mp.doctor.survey.gpu_pair import WARM_UPS, PairSpec

PROGRAM = "hpc_mp.doctor.survey.gpu_pair"


def free_ports(count: int) -> list[int]:
    """Return ports of this node that are free at this moment."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


def measure(side: int, address: str, ports: Sequence[int], order: Message) -> list[Message]:
    """Measure both directions on every GPU. Return this side's view in the form of a transfer's ends."""
    specs = [PairSpec(side, address, port, gpu, order["backend"], order["size"], order["messages"], order["patience"])
             for gpu, port in enumerate(ports)]
    pipe = subprocess.PIPE
    running = [subprocess.Popen([sys.executable, "-m", PROGRAM, json.dumps(asdict(spec))], stdin=subprocess.DEVNULL, stdout=pipe,
                                stderr=pipe, text=True, errors="replace") for spec in specs]
    end = time.monotonic() + order["patience"]
    return [order for gpu, process in enumerate(running) for order in _ends(process, gpu, end)]


def sent(ends: Sequence[Message], side: int, order: Message) -> int:
    """Return the bytes that this side has sent to the other, on all GPUs that succeeded."""
    transfers = len([end for end in ends if "rate" in end and end["direction"] == side])
    return transfers * int(order["size"]) * (int(order["messages"]) + WARM_UPS)


def _ends(process: subprocess.Popen[str], gpu: int, end: float) -> list[Message]:
    try:
        output, error = process.communicate(timeout=max(0.1, end - time.monotonic()))
    except subprocess.TimeoutExpired:
        process.kill()
        process.communicate()
        return [{"rail": gpu, "direction": direction, "why": f"GPU {gpu} did not end in time"} for direction in (0, 1)]
    if process.returncode:
        why = (error.strip().splitlines() or [f"exit code {process.returncode}"])[-1]
        return [{"rail": gpu, "direction": direction, "why": why} for direction in (0, 1)]
    rates = json.loads(output.splitlines()[-1])
    return [{"rail": gpu, "direction": direction, "rate": rate} for direction, rate in enumerate(rates)]
