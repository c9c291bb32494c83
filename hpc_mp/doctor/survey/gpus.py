"""The agent's part of a measurement between the GPUs of a pair of nodes: a bench of two ranks for every GPU.

Both directions are measured at the same time (``sendrecv``). Every GPU has ranks of its own, so that a dead one costs one rail.
"""

import os
import socket
import subprocess
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack

from hpc_mp.doctor.bench.spec import BenchSpec, dump_spec, events
from hpc_mp.doctor.survey.agents import Message
from hpc_mp.planner.collectives import PLACED
from hpc_mp.rundir import SECRET

PROGRAM = "hpc_mp.doctor.bench.ranks.program"
WARM_UPS = 3


def free_ports(count: int) -> list[int]:
    """Return ports of this node that are free at this moment."""
    with ExitStack() as stack:
        listeners = [stack.enter_context(socket.create_server(("", 0))) for _ in range(count)]
        return [listener.getsockname()[1] for listener in listeners]


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
