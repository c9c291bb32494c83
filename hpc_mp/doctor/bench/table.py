"""The table and the JSON document of nccl-tests, character by character, so that their readers can parse ours.

Format: ``writeDeviceReport``, ``writeResultHeader``, ``writeBenchmarkLine*`` and ``writeResultFooter`` in ``src/util.cu`` of
nccl-tests 2.19.6. Additional information is in lines that begin with ``#``, which readers skip.

The JSON document (``-J``, version 3 of their files, with ``-I 1``) has their keys and units; ``tools/analyze_perf_json.py`` reads
it. ``results`` has the slowest group at each size, ``groups`` all groups. Of the environment only variables of the network are
included.
"""

import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from hpc_mp import __version__
from hpc_mp.doctor.bench.result import BenchRow, GroupResult, Judged, Timing, average, statistics
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED

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


VERSION = 3
SHOWN = re.compile(r"NCCL_|RCCL_|GLOO_|UCX_|FI_|OMPI_MCA_|TORCH_NCCL_|CUDA_VISIBLE_DEVICES$")


def document(spec: BenchSpec, ranks: Sequence[dict[str, Any]], versions: Mapping[str, str], rows: Sequence[BenchRow],
             judged: Sequence[Judged], environ: Mapping[str, str], arguments: Sequence[str],
             times: tuple[str, str]) -> dict[str, Any]:
    """Return the whole document. ``times``: start and end of the run, as ``%Y-%m-%d %H:%M:%S``."""
    wrong = sum(1 for row in rows if row.wrong)
    return {
        "version": VERSION,
        "start_time": times[0],
        "args": list(arguments),
        "env": [f"{name}={value}" for name, value in sorted(environ.items()) if SHOWN.match(name)],
        "libraries": dict(versions),
        "config": _config(spec, ranks),
        "results": [_result(spec, row.worst) for row in rows],
        "groups": [{"size": row.worst.size, "median_bus_bw": row.median, "worst_group": row.worst.group,
                    "groups": [_result(spec, result) for result in row.groups]} for row in rows],
        "expected": [asdict(judgement) | {"ratio": judgement.ratio} for judgement in judged],
        "out_of_bounds": {"count": wrong, "okay": str(wrong == 0).lower()},
        "average_bus_bandwidth": {"bandwidth": average(rows), "okay": "unchecked"},
        "errors": [],
        "end_time": times[1],
    }


def _config(spec: BenchSpec, ranks: Sequence[dict[str, Any]]) -> dict[str, Any]:
    return {
        "nthreads": 1, "ngpus": 1, "minimum_bytes": spec.sizes[0], "maximum_bytes": spec.sizes[-1],
        "warmup_iters": spec.warmup, "iterations": spec.iterations, "aggregated_iterations": 1,
        "validation": int(spec.check), "graph": 0, "blocking_collectives": "false", "per_iter_timing": "true",
        "per_iter_skip": 0, "parallel_init": "false",
        "collective": spec.collective, "backend": spec.backend, "nodes": spec.nodes, "ranks_per_node": spec.ranks_per_node,
        "groups": [list(group) for group in spec.groups],
        "devices": [{"rank": rank["rank"], "group": rank["group"], "pid": rank["pid"], "hostname": rank["host"],
                     "device": rank["device"], "device_hex": spec.backend, "device_info": rank["name"]} for rank in ranks],
    }


def _result(spec: BenchSpec, result: GroupResult) -> dict[str, Any]:
    collective = COLLECTIVES[spec.collective]
    entry: dict[str, Any] = {"size": result.size, "count": result.count, "type": spec.dtype,
                             "redop": "sum" if collective.reduces else "none", "root": "0" if collective.rooted else "-1",
                             "group": result.group, "members": list(result.members)}
    for placed in PLACED:
        timing = result.timings[placed]
        entry[placed] = {"time": timing.seconds * 1e6, "alg_bw": timing.algbw, "bus_bw": timing.busbw,
                         "nwrong": None if timing.wrong is None else float(timing.wrong)}
        entry[f"{placed}_per_iter"] = _iterations(timing) | {"spikes": [
            {"iteration": spike.iteration, "times": spike.times, "ranks": [result.members[member] for member in spike.members]}
            for spike in timing.spikes]}
    return entry | {"actual_iterations": spec.iterations, "experiment_name": ""}


def _iterations(timing: Timing) -> dict[str, Any]:
    times = timing.iterations
    entry: dict[str, Any] = {"skipped_iterations": 0, **statistics(times), "times_us": [time * 1e6 for time in times]}
    if len(timing.ranks) > 1:
        entry["per_process_max_times_us"] = [[time * 1e6 for time in rank_times] for rank_times in timing.ranks]
    return entry
