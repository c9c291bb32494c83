"""The table and the JSON document of nccl-tests, character by character, so that their readers can parse ours.

Format: ``writeDeviceReport``, ``writeResultHeader``, ``writeBenchmarkLine*`` and ``writeResultFooter`` in ``src/util.cu`` of
nccl-tests 2.19.6. Additional information is in lines that begin with ``#``, which readers skip.

The JSON document (``-J``, version 3 of their files, with ``-I 1``) has their keys and units; ``tools/analyze_perf_json.py`` reads
it. ``results`` has the slowest group at each size, ``groups`` all groups. Of the environment only variables of the network are
included.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from itertools import pairwise
from typing import Any

from hpc_mp import __version__
from hpc_mp.base.views import view
from hpc_mp.doctor.bench.result import BenchRow, GroupResult, Judged, Timing, average, statistics
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED

TEMPLATE = "doctor/bench/table.txt.j2"
MEMBERS_SHOWN = 8


def number(value: float, width: int) -> str:
    """Format a number with up to two decimals, as many as fit into ``width`` characters (``getFloatStr``)."""
    for decimals in (2, 1, 0):
        text = f"{value:{width}.{decimals}f}"
        if len(text) <= width:
            return text
    return f"{value:{width}.{1 if width >= 7 else 0}e}"


def head(spec: BenchSpec, ranks: Sequence[dict[str, Any]], versions: dict[str, str]) -> list[str]:
    """Return the lines of the header: parameters of the run and its devices."""
    words = view(TEMPLATE, version=__version__, step=_step)
    return str(words.head(spec, ranks, versions, COLLECTIVES[spec.collective])).splitlines()


def _step(sizes: Sequence[int]) -> str:
    pairs = list(pairwise(sizes))
    factors = {after // before for before, after in pairs if after % before == 0}
    if len(factors) <= 1 and all(after % before == 0 for before, after in pairs):
        return f"step: {next(iter(factors), 2)}(factor)"
    return f"step: {sizes[1] - sizes[0]}(bytes)"


def line(spec: BenchSpec, row: BenchRow) -> str:
    """Format one row: the slowest group."""
    collective, result = COLLECTIVES[spec.collective], row.worst
    operation, root = "sum" if collective.reduces else "none", "0" if collective.rooted else "-1"
    return (f"{result.size:12d}  {result.count:12d}  {spec.dtype:>8}  {operation:>6}  {root:>6}"
            f"{_timing(result.timings['out_of_place'])}{_timing(result.timings['in_place'])}")


def _timing(timing: Timing) -> str:
    wrong = "    N/A" if timing.wrong is None else f"  {timing.wrong:6g}"
    return f"  {number(timing.seconds * 1e6, 7)}  {number(timing.algbw, 6)}  {number(timing.busbw, 6)}{wrong}"


def foot(spec: BenchSpec, rows: Sequence[BenchRow], judged: Sequence[Judged]) -> list[str]:
    """Return the lines of the footer: sums, spikes, groups, and expectations."""
    wrong = sum(1 for row in rows if row.wrong)
    spikes = [(spike, result) for row in rows for result in row.groups for spike in result.timings[row.native].spikes]
    words = view(TEMPLATE, members=_members)
    return str(words.foot(spec, rows, judged, COLLECTIVES[spec.collective], wrong, average(rows),
                          sorted(spikes, key=lambda entry: -entry[0].times))).splitlines()


def _members(ranks: Sequence[int], places: Sequence[int] | None = None) -> str:
    """Return the ranks, or those at some places of the group."""
    names = [str(ranks[place]) for place in (range(len(ranks)) if places is None else places)]
    return ", ".join(names) if len(names) <= MEMBERS_SHOWN else f"{', '.join(names[:MEMBERS_SHOWN])}, … ({len(names)} ranks)"


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
