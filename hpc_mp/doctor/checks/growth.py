"""Checks of counters that grew since an earlier reading: link errors, lost packets, corrected memory errors, heat.

Lifetime totals are never judged, except uncorrected memory errors since boot.
"""

from collections.abc import Iterator
from functools import partial

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import duration
from hpc_mp.cluster.node.counters import Changes, read_changes
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well, words

_WAIT_SHARE = 0.1  # of the ticks in which a port sent or waited
_SEGMENTS = 10_000  # too few below this to estimate a loss rate
_BAD_LOSS, _LOSS = 0.05, 0.001
_DISCARDS, _DISCARD_SHARE = 1000, 0.001
_PAUSES_PER_S = 100.0
_FLAPS = {"fabric": 5, "net": 3}  # Azure's healthagent: InfiniBand, Ethernet


def _over(changes: Changes) -> str:
    return f"in {duration(changes.seconds)}"


def _subjects(changes: Changes, room: str) -> dict[str, dict[str, int]]:
    """Return the growth of each counter, by device or by device and port."""
    growth: dict[str, dict[str, int]] = {}
    for name, grown in changes.of(room).items():
        subject, _, counter = name.rpartition("/")
        growth.setdefault(subject, {})[counter] = grown
    return growth


def _bounded(code: str, room: str, changes: Changes) -> Iterator[Judgement]:
    bounds = words()[code]["bounds"]
    for subject, counters in _subjects(changes, room).items():
        graves = {name: "error" if grown > bounds[name][1] else "warning" if grown > bounds[name][0] else "ok"
                  for name, grown in counters.items() if name in bounds}
        bad = ", ".join(f"{name} +{counters[name]}" for name, grave in graves.items() if grave != "ok")
        label = subject.replace("/", " port ")
        if bad:
            yield Judgement("error" if "error" in graves.values() else "warning", f"{bad} {_over(changes)}", label)
        elif graves:
            yield Judgement("ok", f"{len(graves)} counters of errors stood still {_over(changes)}", label)


def congestion(changes: Changes) -> Iterator[Judgement]:
    for subject, counters in _subjects(changes, "fabric/").items():
        waited, sent = counters.get("port_xmit_wait"), counters.get("port_xmit_data", 0)
        if waited is None:
            continue
        share = waited / (waited + sent) if waited else 0.0
        bad = share > _WAIT_SHARE and waited > 1e6
        yield Judgement("warning" if bad else "ok",
                        f"waited for credit in {share:.1%} of the ticks in which it had data {_over(changes)}",
                        subject.replace("/", " port "))


def flaps(changes: Changes) -> Iterator[Judgement]:
    for room in ("fabric", "net"):
        for subject, counters in _subjects(changes, f"{room}/").items():
            changed = counters.get("carrier_changes") if room == "net" else counters.get("link_downed")
            if changed is None:
                continue
            downs = max(changed // 2, counters.get("carrier_down_count", 0)) if room == "net" else changed
            grave: Severity = "error" if downs > _FLAPS[room] else "warning" if downs else "ok"
            yield Judgement(grave, f"went down {downs} times {_over(changes)}", subject.replace("/", " port "))


def discards(changes: Changes) -> Iterator[Judgement]:
    for subject, counters in _subjects(changes, "net/").items():
        lost = sum(grown for name, grown in counters.items()
                   if name in ("rx_dropped", "tx_dropped", "rx_missed_errors", "rx_fifo_errors")
                   or "discards" in name or name.endswith(("out_of_buffer", "no_buffer_count", "allowance_exceeded")))
        packets = counters.get("rx_packets", 0) + counters.get("tx_packets", 0)
        bad = lost > _DISCARDS and lost > _DISCARD_SHARE * packets
        yield Judgement("warning" if bad else "ok", f"{lost} of {packets} packets {_over(changes)}", subject)


def pauses(changes: Changes) -> Iterator[Judgement]:
    for subject, counters in _subjects(changes, "net/").items():
        frames = {name: grown for name, grown in counters.items()
                  if "pause" in name and not name.endswith(("_duration", "_transition"))}
        if not frames:
            continue
        worst = max(frames, key=frames.__getitem__)
        bad = frames[worst] > _PAUSES_PER_S * max(changes.seconds, 10)
        yield Judgement("warning" if bad else "ok", f"{worst} +{frames[worst]} {_over(changes)}", subject)


def loss(changes: Changes) -> Iterator[Judgement]:
    sent, repeats = changes.grown.get("tcp/OutSegs"), changes.grown.get("tcp/RetransSegs")
    if sent is None or repeats is None:
        return
    share = repeats / sent if sent else 0.0
    enough = sent >= _SEGMENTS
    grave: Severity = "error" if enough and share > _BAD_LOSS else "warning" if enough and share > _LOSS else "ok"
    yield Judgement(grave, f"{repeats} of {sent} segments were sent again ({share:.2%}) {_over(changes)}")


def memory(changes: Changes) -> Iterator[Judgement]:
    for subject, counters in _subjects(changes, "memory/").items():
        lost, mended = changes.now.get(f"memory/{subject}/ue_count", 0), counters.get("ce_count", 0)
        if lost:
            yield Judgement("error", f"{lost} errors since boot could not be corrected", subject)
        else:
            bad = mended > 1000
            yield Judgement("warning" if bad else "ok", f"{mended} corrected errors {_over(changes)}", subject)


def heat(changes: Changes) -> Iterator[Judgement]:
    grown = changes.of("heat/")
    if grown:
        largest = max(grown.values())
        bad = largest > 3
        yield Judgement("warning" if bad else "ok", f"slowed for heat {largest} times {_over(changes)}")


def pci(changes: Changes) -> Iterator[Judgement]:
    counts = {subject: (counters.get("fatal", 0) + counters.get("nonfatal", 0), counters.get("correctable", 0))
              for subject, counters in _subjects(changes, "pci/").items()}
    bad = (Judgement("error" if fatal else "warning",
                     f"{fatal} errors that could not be corrected, {mended} corrected {_over(changes)}", subject)
           for subject, (fatal, mended) in counts.items() if fatal or mended > 1000)
    well = f"{len(counts)} devices report their errors; none grew {_over(changes)}" if counts else ""
    yield from or_well(bad, well)


CHECKS = checks_of(read_changes, {
    "fabric-errors": partial(_bounded, "fabric-errors", "fabric/"),
    "fabric-retransmits": partial(_bounded, "fabric-retransmits", "fabric/"),
    "fabric-congestion": congestion,
    "efa-errors": partial(_bounded, "efa-errors", "fabric/"),
    "link-flap": flaps,
    "ethernet-errors": partial(_bounded, "ethernet-errors", "net/"),
    "ethernet-discards": discards,
    "ethernet-pause": pauses,
    "tcp-retransmits": loss,
    "memory-errors": memory,
    "cpu-throttle": heat,
    "pci-errors": pci,
})
