"""The JSON document of nccl-tests (``-J``, version 3 of its files, with ``-I 1``), with additional keys.

Keys and units are those of ``src/util.cu`` of nccl-tests 2.19.6; its ``tools/analyze_perf_json.py`` reads this. ``results`` has
the slowest group at each size, ``groups`` all groups. Of the environment only variables of the network are included.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import asdict
from typing import Any

from hpc_mp.doctor.bench.expectation import Judged
from hpc_mp.doctor.bench.result import BenchRow, GroupResult, Timing, average, statistics
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED

VERSION = 3
SHOWN = re.compile(r"NCCL_|RCCL_|GLOO_|UCX_|FI_|OMPI_MCA_|TORCH_NCCL_|CUDA_VISIBLE_DEVICES$")


def document(
    spec: BenchSpec, ranks: Sequence[dict[str, Any]], versions: Mapping[str, str], rows: Sequence[BenchRow],
    judged: Sequence[Judged], environ: Mapping[str, str], arguments: Sequence[str], times: tuple[str, str],
) -> dict[str, Any]:
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
