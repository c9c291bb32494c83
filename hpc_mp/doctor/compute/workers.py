"""Measurement of the devices of this machine: one process per device, all of them under load at the same time."""

import contextlib
import json
import os
import selectors
import signal
import subprocess
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from typing import Any

from hpc_mp.cluster.node.nvidia_smi import GpuLoad, read_load
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor.compute.judge import Result

SOURCE = NodeSource()
COMMAND = (sys.executable, "-m", "hpc_mp.doctor.compute.program")
START_S = 120.0  # import of torch from a slow file system, and the first CUDA context
MORE_S = 60.0  # beyond the expected duration of a phase


def devices_here(source: NodeSource = SOURCE, environ: Mapping[str, str] = os.environ) -> tuple[str, ...]:
    """Return "cuda:0" … for the GPUs that this process may use, else "cpu"."""
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    count = len([name for name in visible.split(",") if name.strip()]) if visible is not None else len(_loads(source))
    return tuple(f"cuda:{index}" for index in range(count)) or ("cpu",)


def measure(devices: Sequence[str], seconds: float = 2.0, command: Sequence[str] = COMMAND, source: NodeSource = SOURCE,
            environ: Mapping[str, str] | None = None) -> tuple[Result, ...]:
    """Measure all devices ("cuda:0" …, or "cpu") in the phases load, check and copies, with ``seconds`` of load for each work.

    ``command`` measures one device, ``environ`` is added to its environment; ``source`` has clocks and links while the GPUs work.
    """
    crew = [_Worker(device, seconds, command, environ or {}) for device in devices]
    loads: tuple[GpuLoad, ...] = ()
    try:
        _wait(crew, START_S)
        _ask(crew, "load")
        if any(device != "cpu" for device in devices):
            time.sleep(seconds)
            loads = _loads(source)
        _wait(crew, 4 * seconds + MORE_S)
        _ask(crew, "check")
        _wait(crew, MORE_S)
        for worker in crew:  # one after the other: host memory, PCIe switches and NVLinks are shared
            _ask([worker], "copies")
            _wait([worker], MORE_S)
    finally:
        for worker in crew:
            worker.end()
    return tuple(worker.result(os.uname().nodename, loads) for worker in crew)


def _loads(source: NodeSource) -> tuple[GpuLoad, ...]:
    with contextlib.suppress(Unavailable):
        return read_load(source)
    return ()


class _Worker:
    """The process of one device, and its answers."""

    def __init__(self, device: str, seconds: float, command: Sequence[str], environ: Mapping[str, str]) -> None:
        self.device = device
        self.answers: dict[str, Any] = {}
        self.error = ""
        self.process = subprocess.Popen(
            [*command, device, str(seconds)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL,
            encoding="utf-8", errors="replace", env={"CUDA_DEVICE_ORDER": "PCI_BUS_ID", **os.environ, **environ},
                                        start_new_session=True)

    def ask(self, phase: str) -> None:
        try:
            print(phase, file=self.process.stdin, flush=True)
        except OSError:
            self.error = "its process ended"

    def take(self, line: str) -> None:
        try:
            answer = json.loads(line)
        except ValueError:
            self.error = "its process ended without a word" if not line else f"its process said {line[:80]!r}"
            return
        self.error = answer.pop("error", "")
        for name, value in answer.items():
            old = self.answers.get(name)
            self.answers[name] = {**old, **value} if isinstance(old, dict) else [*old, *value] if isinstance(old, list) else value

    def result(self, host: str, loads: Sequence[GpuLoad]) -> Result:
        answers = self.answers
        mine = next((_loaded(load) for load in loads if load.bus == answers.get("bus")), {})
        return Result(host, self.device, answers.get("kind", ""), answers.get("software", ""), answers.get("rates", {}),
                      tuple(answers.get("wrong", ())), tuple(answers.get("unsteady", ())),
                      answers.get("digests", {}), answers.get("share"), mine, self.error)

    def end(self) -> None:
        """Kill the process group. A process that hangs in the driver cannot be killed and is left behind."""
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(self.process.pid, signal.SIGKILL)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self.process.wait(5)


def _ask(crew: Iterable[_Worker], phase: str) -> None:
    for worker in crew:
        if not worker.error:
            worker.ask(phase)


def _wait(crew: Iterable[_Worker], limit: float) -> None:
    """Take one answer from every worker without an error, within ``limit`` seconds."""
    with selectors.DefaultSelector() as ready:
        for worker in crew:
            if not worker.error and worker.process.stdout is not None:
                ready.register(worker.process.stdout, selectors.EVENT_READ, worker)
        for worker, line in _lines(ready, time.monotonic() + limit):
            worker.take(line)
        for key in list(ready.get_map().values()):
            key.data.error = f"no answer within {limit:g} s"


def _lines(ready: selectors.BaseSelector, end: float) -> Iterator[tuple[_Worker, str]]:
    while ready.get_map() and (remaining := end - time.monotonic()) > 0:
        for key, _ in ready.select(remaining):
            line = key.data.process.stdout.readline()  # workers write whole lines
            ready.unregister(key.fileobj)
            yield key.data, line


def _loaded(load: GpuLoad) -> dict[str, float]:
    generation, max_generation, lanes, max_lanes = load.pcie
    values = {"clock": load.clock, "max clock": load.max_clock, "pcie": generation, "max pcie": max_generation, "lanes": lanes,
            "max lanes": max_lanes, "temperature": load.temperature, "power": load.power, "reasons": load.reasons}
    return {name: value for name, value in values.items() if value is not None}
