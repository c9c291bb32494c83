"""The table of nccl-tests, character by character, so that their readers can parse ours.

Format: ``writeDeviceReport``, ``writeResultHeader``, ``writeBenchmarkLine*`` and ``writeResultFooter`` in ``src/util.cu`` of
nccl-tests 2.19.6. Additional information is in lines that begin with ``#``, which readers skip.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from itertools import pairwise
from typing import Any

from hpc_mp import __version__
from hpc_mp.doctor.bench.expectation import Judged
from hpc_mp.doctor.bench.result import BenchRow, Timing, average
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.planner.collectives import COLLECTIVES

SPIKES_SHOWN = 3
MEMBERS_SHOWN = 8


def number(value: float, width: int) -> str:
    """Format a number with up to two decimals, as many as fit into ``width`` characters (``getFloatStr``)."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def head(spec: BenchSpec, ranks: Sequence[dict[str, Any]], versions: dict[str, str]) -> Iterator[str]:
    """Yield the header: parameters of the run and its devices."""
    collective = COLLECTIVES[spec.collective]
    libraries = " ".join(f"{name} {version}" for name, version in versions.items())
    yield f"# hpc-mp bench {__version__} {spec.backend} ({libraries})"
    yield f"# Collective test starting: {collective.program}"
    yield (f"# nThread 1 nGpus 1 minBytes {spec.sizes[0]} maxBytes {spec.sizes[-1]} {_step(spec.sizes)} "
           f"warmup iters: {spec.warmup} iters: {spec.iterations} agg iters: 1 validation: {int(spec.check)} graph: 0 unalign: 0")
    yield "#"
    yield "# Using devices"
    for rank in ranks:
        yield (f"#  Rank {rank['rank']:2d} Group {rank['group']:2d} Pid {rank['pid']:6d} on {rank['host']:>10} "
               f"device {rank['device']:2d} [{spec.backend}] {rank['name']}")
    if len(spec.groups) > 1:
        yield f"# {len(spec.groups)} groups at the same time; each row is the slowest group at that size"
    if collective.native == "in_place":
        yield f"# torch offers {spec.collective} in place: out-of-place includes the copy before it"
    yield "#"
    yield f"# {'':>10}  {'':>12}  {'':>8}  {'':>6}  {'':>6}           out-of-place                       in-place          "
    columns = ("time", "algbw", "busbw", "#wrong")
    yield _columns("size", "count", "type", "redop", "root", *columns, *columns)
    units = ("(us)", "(GB/s)", "(GB/s)", "")
    yield _columns("(B)", "(elements)", "", "", "", *units, *units)


def _step(sizes: Sequence[int]) -> str:
    """Return the step between sizes as nccl-tests writes it."""
    pairs = list(pairwise(sizes))
    factors = {after // before for before, after in pairs if after % before == 0}
    if len(factors) <= 1 and all(after % before == 0 for before, after in pairs):
        return f"step: {next(iter(factors), 2)}(factor)"
    return f"step: {sizes[1] - sizes[0]}(bytes)"


def _columns(*texts: str) -> str:
    widths = (10, 12, 8, 6, 6, 7, 6, 6, 6, 7, 6, 6, 6)
    return "# " + "  ".join(f"{text:>{width}}" for text, width in zip(texts, widths, strict=True)) + " "


def line(spec: BenchSpec, row: BenchRow) -> str:
    """Format one row: the slowest group."""
    collective, result = COLLECTIVES[spec.collective], row.worst
    operation, root = "sum" if collective.reduces else "none", "0" if collective.rooted else "-1"
    return (f"{result.size:12d}  {result.count:12d}  {spec.dtype:>8}  {operation:>6}  {root:>6}"
            f"{_timing(result.timings['out_of_place'])}{_timing(result.timings['in_place'])}")


def _timing(timing: Timing) -> str:
    wrong = "    N/A" if timing.wrong is None else f"  {timing.wrong:6g}"
    return f"  {number(timing.seconds * 1e6, 7)}  {number(timing.algbw, 6)}  {number(timing.busbw, 6)}{wrong}"


def foot(spec: BenchSpec, rows: Sequence[BenchRow], judged: Sequence[Judged]) -> Iterator[str]:
    """Yield the footer: sums, spikes, groups, and expectations."""
    wrong = sum(1 for row in rows if row.wrong)
    yield f"# {'Out of bounds values':<20} : {wrong} {'FAILED' if wrong else 'OK'}"
    yield f"# {'Avg bus bandwidth':<20} : {average(rows):g} "
    yield "#"
    yield from _spikes(rows)
    if len(spec.groups) > 1:
        yield from _groups(rows)
    yield from _expected(judged)
    yield f"# Collective test concluded: {COLLECTIVES[spec.collective].program}"


def _spikes(rows: Iterable[BenchRow]) -> Iterator[str]:
    spikes = [(spike, result) for row in rows for result in row.groups for spike in result.timings[row.native].spikes]
    for spike, result in sorted(spikes, key=lambda entry: -entry[0].times)[:SPIKES_SHOWN]:
        ranks = members(tuple(result.members[member] for member in spike.members))
        yield (f"# Spike                : {result.size} B, iteration {spike.iteration}: {spike.times:.1f} x the median, "
               f"seen by {'rank' if len(spike.members) == 1 else 'ranks'} {ranks}")
    if len(spikes) > SPIKES_SHOWN:
        yield f"# Spike                : and {len(spikes) - SPIKES_SHOWN} more (--json has every iteration)"


def _groups(rows: Iterable[BenchRow]) -> Iterator[str]:
    yield f"# {'size (B)':>12}  {'worst':>8}  {'median':>8}  GB/s; the slowest group"
    for row in rows:
        result = row.worst
        yield (f"# {result.size:12d}  {row.busbw(result):8.4g}  {row.median:8.4g}  group {result.group}: "
               f"ranks {members(result.members)}")


def _expected(judged: Sequence[Judged]) -> Iterator[str]:
    if not judged:
        yield "# Expected             : unknown; name the fabric (--fabric), or what a node's network carries (--node-rate)"
        return
    yield f"# {'size (B)':>12}  {'measured':>8}  {'expected':>8}  {'ratio':>6}  GB/s busbw; verdict"
    for row in judged:
        yield (f"# {row.size:12d}  {row.measured:8.4g}  {row.expected:8.4g}  {row.ratio:6.2f}  {row.verdict}"
               + (f"; NICs carried at least {row.share:.4g} per rank" if row.share is not None else ""))


def members(ranks: Sequence[int]) -> str:
    shown = ", ".join(map(str, ranks[:MEMBERS_SHOWN]))
    return shown if len(ranks) <= MEMBERS_SHOWN else f"{shown}, … ({len(ranks)} ranks)"
