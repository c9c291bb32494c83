"""Results of devices, and findings on those that compute slower than their peers, or with other results."""

import statistics
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from hpc_mp.base.findings import Finding, Severity
from hpc_mp.base.text import data_rate
from hpc_mp.catalogue import catalogue
from hpc_mp.doctor.checks.gpu_state import HALVED, REASONS, SLOWED


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement result of one device."""

    host: str
    device: str  # "cuda:5" or "cpu"
    kind: str = ""  # model and size of the device; devices of equal kind are compared
    software: str = ""  # library and version; results are compared bit for bit among equal kinds with equal software
    # "matmul bf16" and so on in TFLOP/s, "memory", "host to device", "device to host", "to peer" in GB/s
    rates: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()  # problems with a known exact answer that the device got wrong
    unsteady: tuple[str, ...] = ()  # problems whose answer was not the same every time
    # digests of the answers, which must be equal on equal devices; by problem, on CPUs by core ("core 3")
    digests: Mapping[str, str] = field(default_factory=dict)
    # fraction of the processors' time that it got under load; below 1 if other programs compute too, or a cgroup limits it;
    # None for a GPU
    share: float | None = None
    # nvidia-smi's report of this GPU under load: "clock", "max clock" (MHz), "pcie", "max pcie" (generation), "lanes", "max
    # lanes", "temperature" (degrees C), "power" (W), "reasons" (bit mask). Empty if nvidia-smi gave no answer.
    loaded: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # reason why the measurement is incomplete; empty if it is complete

    def __str__(self) -> str:
        return f"{self.host} {self.device}"


@dataclass(frozen=True, slots=True)
class Tolerance:
    """Fractions below the peers' median: the least shortfall that is a warning, and the shortfall that is an error."""

    warning: float
    error: float


# Equal GPUs under equal load differ by 2 to 4 % (silicon, cooling); copies share their paths, virtual CPUs share their hosts.
_OF_GPU, _OF_COPY, _OF_CPU = Tolerance(0.06, 0.20), Tolerance(0.10, 0.30), Tolerance(0.15, 0.30)
_SIGMAS = 5.0  # of the peers' own spread, estimated from their median absolute deviation
_MAD = 1.4826  # ratio of standard deviation to median absolute deviation of a normal distribution
_SLOW_CORE = 0.5  # of the median core's speed
_SLOW = ("see gpu-throttle, gpu-power-limit, gpu-clocks and gpu-temperature; on CPUs the governor, other programs, and the "
         "limits of the cgroup")
_DISTRUST = "drain the node; do not trust what it computed; have the device replaced"


def judge(results: Sequence[Result]) -> Iterator[Finding]:
    """Yield findings over all devices of one or more nodes. Devices of one kind and software are compared."""
    for result in results:
        yield from _alone(result)
    groups: dict[tuple[str, str], list[Result]] = defaultdict(list)
    for result in results:
        if not result.error or result.rates:
            groups[result.kind, result.software].append(result)
    for (kind, _), peers in groups.items():
        yield from _slow(kind, peers)
        yield from _unequal(kind, peers)


def _alone(result: Result) -> Iterator[Finding]:
    if result.error:
        yield Finding("compute-failed", "error", str(result), result.error, "see the GPU checks of this node (gpu-xid, gpu-smi)")
    for code, words, problems in (("compute-wrong", "wrong answers to problems whose answer is known", result.wrong),
                                  ("compute-unsteady", "the same work gave different bits", result.unsteady)):
        if problems:
            yield Finding(code, "error", str(result), f"{words}: {', '.join(problems)}", _DISTRUST)
    slow_core = result.rates.get("slowest core against the median core")
    if slow_core is not None and slow_core < _SLOW_CORE:
        yield Finding("compute-core", "warning", str(result), f"its slowest core has {slow_core:.0%} of the median core's speed",
                      "look for another program on that core, and at the governor and temperature of this processor")
    yield from _loaded(result)
    model = catalogue().gpu(result.kind)
    if model and model.host_copy_gbs is not None:
        for way in ("host to device", "device to host"):
            rate = result.rates.get(way)
            if rate is not None and rate < model.host_copy_gbs:
                yield Finding("compute-host-copy", "error", str(result),
                              f"{way} {data_rate(rate)}; a {result.kind.partition(',')[0]} "
                              f"reaches {data_rate(model.host_copy_gbs)}",
                              "see gpu-pcie-width and gpu-pcie-speed; pin the rank to the GPU's NUMA node")


def _loaded(result: Result) -> Iterator[Finding]:
    """Yield findings from nvidia-smi's report under load, when GPU clocks and the PCIe link are at full speed."""
    load = result.loaded
    for what, label in (("pcie", "PCIe generation"), ("lanes", "PCIe lanes")):
        if what in load and load[what] < load.get(f"max {what}", load[what]):
            yield Finding("compute-pcie", "error", str(result),
                          f"under load {label} {load[what]:.0f} of {load[f'max {what}']:.0f}",
                          "reseat the GPU or its riser; look at the slot's BIOS setting; have the board replaced")
    if mask := int(load.get("reasons", 0)) & SLOWED:
        names = [name.replace("_", " ") for name, bit in REASONS.items() if mask & bit]
        clocks = f", {load['clock']:.0f} of {load['max clock']:.0f} MHz" if {"clock", "max clock"} <= load.keys() else ""
        yield Finding("compute-throttle", "error" if mask & HALVED else "warning", str(result),
                      f"slowed down under load: {', '.join(names)} (event reasons {mask:#x}){clocks}",
                      "look at the node's fans, cooling loop, room and power supplies; compare with its neighbours")


def _slow(kind: str, peers: Sequence[Result]) -> Iterator[Finding]:
    ill, by_name = False, _by_name(peers)
    shares = {str(peer): f"; it got {peer.share:.0%} of its CPUs' time" for peer in peers if peer.share is not None}
    for what, rates in by_name.items():
        copies = what in ("host to device", "device to host", "to peer")
        limit = _OF_CPU if all(peer.device == "cpu" for peer in peers) else _OF_COPY if copies else _OF_GPU
        for who, factor in _below(rates, limit):
            ill = True
            both = len(who) > 1
            severity: Severity = "error" if factor < 1 - limit.error and not both else "warning"
            than_what = "of the other's: one is slow or the other fast, two cannot tell" if both else "of its peers' median"
            yield Finding("compute-slow", severity, ", ".join(who),
                          f"{what} {min(rates[name] for name in who):.4g} {_unit(what)}, {factor:.0%} {than_what}"
                          + ("" if both else shares.get(who[0], "")), _SLOW)
    if not ill and any(peer.rates for peer in peers):
        shown = ", ".join(f"{what} {statistics.median(rates.values()):.4g} {_unit(what)}" for what, rates in by_name.items())
        alone = "; nothing to compare it with" if len(peers) == 1 else ""
        yield Finding("compute-slow", "ok", "", f"{len(peers)} × {kind}: {shown}{alone}")


def _below(rates: Mapping[str, float], tolerance: Tolerance) -> Iterator[tuple[tuple[str, ...], float]]:
    """Yield the names of slow devices and their fraction of the median. If there are only two and they differ, yield both."""
    if len(rates) == 2:
        low, high = sorted(rates.values())
        if low < (1 - tolerance.warning) * high:
            yield tuple(rates), low / high
    elif len(rates) > 2:
        median = statistics.median(rates.values())
        spread = _MAD * statistics.median(abs(rate - median) for rate in rates.values())
        lack = min(max(tolerance.warning * median, _SIGMAS * spread), tolerance.error * median)  # spread of few peers is noisy
        yield from (((name,), rate / median) for name, rate in rates.items() if rate < median - lack)


def _unequal(kind: str, peers: Sequence[Result]) -> Iterator[Finding]:
    """Compare results bit for bit: the same problem on devices of one kind, and on the cores of one node."""
    answers: dict[str, dict[str, str]] = defaultdict(dict)  # problem → who → digest; all cores answer the same problem
    for peer in peers:
        for problem, digest in peer.digests.items():
            core = problem.startswith("core ")
            answers["bits of a core" if core else problem][f"{peer} {problem}" if core else str(peer)] = digest
    for problem, by_who in answers.items():
        counts = Counter(by_who.values())
        if len(counts) == 1:
            if len(by_who) > 1:
                yield Finding("compute-unequal", "ok", "", f"{problem}: {len(by_who)} answers of {kind}, equal in every bit")
            continue
        usual, votes = counts.most_common(1)[0]
        sure = votes > len(by_who) / 2
        others = [who for who, digest in by_who.items() if digest != usual] if sure else list(by_who)
        why = f"{votes} others agree" if sure else "no answer has a majority"
        yield Finding("compute-unequal", "error", ", ".join(others[:8]), f"{problem}: other bits than its equals; {why}",
                      _DISTRUST)


def _by_name(peers: Sequence[Result]) -> dict[str, dict[str, float]]:
    names = {name for peer in peers for name in peer.rates if not name.startswith("slowest core")}
    return {name: {str(peer): peer.rates[name] for peer in peers if name in peer.rates} for name in sorted(names)}


def _unit(what: str) -> str:
    return "TFLOP/s" if what.startswith("matmul") else "GB/s"
