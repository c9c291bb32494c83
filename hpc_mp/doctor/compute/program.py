"""``python -m hpc_mp.doctor.compute.program DEVICE SECONDS``: measurement of one device, one phase per line on stdin.

It answers every line with one JSON line. The parent process thereby decides which devices work at the same time: all of them
under load, one after the other for copies over shared paths.
"""

import json
import os
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from typing import Any, TextIO

from hpc_mp.doctor.compute.device import ComputeDevice, Pieces

CORE_REPEATS = 3


def main(arguments: Sequence[str], lines: TextIO = sys.stdin, out: TextIO = sys.stdout) -> int:
    """Return 0 at the end of ``lines``, 1 if a phase failed (its answer states the reason)."""
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")  # makes cuBLAS reproducible from run to run
    name, seconds = arguments[0], float(arguments[1])
    try:
        device = _device(name)
        phases: dict[str, Callable[[], dict[str, Any]]] = {
            "load": lambda: _rates(device.load(seconds)), "check": lambda: _check(device),
                                                           "copies": lambda: _rates(device.copies())}
        _say(out, {"kind": device.kind, "software": device.software, "bus": device.bus})
        for line in lines:
            _say(out, phases[line.strip()]())
    except Exception as error:  # any failure (no driver, no memory, a dead GPU) must be reported in the answer
        _say(out, {"error": f"{type(error).__name__}: {error}"[:500]})
        return 1
    return 0


def _device(name: str) -> ComputeDevice:
    try:
        from hpc_mp.doctor.compute.torch_device import TorchDevice
    except ImportError:
        from hpc_mp.doctor.compute.device import NumpyDevice

        return NumpyDevice(name)
    return TorchDevice(name)


def _rates(measured: Iterator[tuple[str, Pieces]]) -> dict[str, Any]:
    summary: dict[str, Any] = {"rates": {}, "unsteady": []}
    for name, pieces in measured:
        summary["rates"][name] = statistics.median(pieces.rates)
        summary["unsteady"] += [] if pieces.steady else [name]
        if pieces.share is not None:
            summary.setdefault("share", pieces.share)  # of the first kind of work, which keeps all processors busy
    return summary


def _check(device: ComputeDevice) -> dict[str, Any]:
    from hpc_mp.doctor.compute import problem

    left, right = problem.exact()
    wrong = [] if problem.whole(left.astype("f8") @ right.astype("f8")) == problem.KNOWN else ["exact fp64 on the host"]
    wrong += [name for name, right_one in device.check() if not right_one]
    digests: dict[str, str] = {}
    unsteady: list[str] = []
    rates: dict[str, float] = {}
    for name, answer in device.answers():
        if name == "core":
            device.one_thread()
            cores = _cores(answer)
            digests |= {core: digest for core, (digest, _, _) in cores.items()}
            unsteady += [core for core, (_, _, variants) in cores.items() if variants > 1]
            speeds = [1 / best for _, best, _ in cores.values()]
            rates["slowest core against the median core"] = min(speeds) / statistics.median(speeds)
        else:
            answers = {problem.digest(answer()) for _ in range(CORE_REPEATS)}
            digests[name] = min(answers)
            unsteady += [name] if len(answers) > 1 else []
    return {"wrong": wrong, "unsteady": unsteady, "digests": digests, "rates": rates}


def _cores(answer: Callable[[], bytes]) -> dict[str, tuple[str, float, int]]:
    """Return, by allowed core, the digest of its answer, its best time, and the number of different answers that it gave."""
    from hpc_mp.doctor.compute.problem import digest

    allowed = os.sched_getaffinity(0)
    cores: dict[str, tuple[str, float, int]] = {}
    try:
        for core in sorted(allowed):
            os.sched_setaffinity(0, {core})
            answer()  # caches and clocks
            variants: set[str] = set()
            best = float("inf")
            for _ in range(CORE_REPEATS):
                begin = time.thread_time()  # CPU time of this thread: other programs on the core do not count
                variants.add(digest(answer()))
                best = min(best, time.thread_time() - begin)
            cores[f"core {core}"] = min(variants), best, len(variants)
    finally:
        os.sched_setaffinity(0, allowed)
    return cores


def _say(out: TextIO, answer: dict[str, Any]) -> None:
    print(json.dumps(answer), file=out, flush=True)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
