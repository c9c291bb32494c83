"""Predictions of the planner against published training results.

    python benchmarks/planner_vs_published.py --csv FILE [--core] [--leave-out] [--json]

FILE has a row for each result: model, layout, GPU, network, framework, and what was published. With ``--leave-out`` each source,
then each type of GPU, is left out in turn, and the frameworks' factors are fitted anew to the others. A row's own result is never
used for it. Scores are those of ``norm_tokens_per_s_per_gpu``: tokens per second as published, or from TFLOP/s by one formula for
all rows. ``published_held_out.csv`` beside this file has rows that no factor was fitted to. Those said to be recalled are from
memory; that time, FLOP/s and share of the peak agree within 1.5 % (``check_ratio``) is the check of them.
"""

import argparse
import csv
import json
import math
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from pathlib import Path
from statistics import median, quantiles
from typing import Any

from hpc_mp.catalogue import catalogue
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import Degrees
from hpc_mp.planner.fabrics import fabric
from hpc_mp.planner.frameworks import FRAMEWORKS, FUSED, Framework, footprint_elsewhere
from hpc_mp.planner.machine import NodeType
from hpc_mp.planner.step import step_time

Row = Mapping[str, str]
FP8 = 1.6  # gain of products in fp8, whose peak is twice that of bf16
USUAL_GBPS = 1600  # of a node whose network is not stated
FABRICS = {"H100": "ndv5", "H200": "ndh200v5", "H800": "ndv5", "GH200": "ndv5", "B200": "p6-b200", "A100": "ndv4", "A800": "ndv4",
           "V100": "ndv2", "MI300X": "ndmi300xv5"}
NETWORKS = {"OmniPath": 0.25}  # share of the wire's rate that NCCL reached: bigscience, experiments/bandwidth
CONTEXT = 2e9  # bytes of a CUDA context and communicators, which torch does not count
THIRD = 1 / 3  # of a layer's activations that selective-op keeps: every second product's and attention's
HALVES = ("selective-op", "selective-layer")  # recompute half of a layer, or every second one


@dataclass(frozen=True)
class Case:
    """A row as the planner sees it. ``layouts``: two, of which the mean counts, if half of the layers are recomputed."""

    row: Row
    layouts: tuple[Layout, ...]
    shape: ModelShape
    machine: NodeType
    framework: str
    flash: bool

    @property
    def published(self) -> float | None:
        return number(self.row, "norm_tokens_per_s_per_gpu") or None


def number(row: Row, column: str, default: float = 0.0) -> float:
    return float(row[column]) if row.get(column) else default


def machine_of(row: Row) -> NodeType:
    """Return the machine: links of the GPU's generation, NICs and memory as stated."""
    name = row["gpu"]
    word = next((word for word in sorted(FABRICS, key=len, reverse=True) if name.startswith(word)), "A100")
    size = number(row, "gpu_mem_gb", 80)
    models = [gpu for gpu in catalogue().gpus.values() if gpu.name.startswith(word) and gpu.memory_gbs]
    if not models:
        models = [gpu for gpu in catalogue().gpus.values() if gpu.name.startswith("H100")]
    gpu = min(models, key=lambda gpu: (abs((gpu.memory or 0) / 1e9 - size), gpu.name != name))
    peak = number(row, "gpu_peak_bf16_tflops", gpu.peak_tflops.get("bf16") or gpu.peak_tflops["fp16"])
    if word == "H100" and (watts := re.search(r"(\d+)W", name)):
        peak *= math.sqrt(int(watts[1]) / 700)  # clocks fall about with the root of the power
    peak *= gain_of(row)
    gpu = replace(gpu, memory_mib=int(size * 1024), peak_tflops={**gpu.peak_tflops, "bf16": peak, "fp16": peak},
                  memory_gbs=2400 if "HBM2e" in name and word == "H100" else gpu.memory_gbs)
    per_node = int(number(row, "gpus_per_node", 8))
    gbps = number(row, "inter_gbps_per_node") or USUAL_GBPS
    share = next((share for word, share in NETWORKS.items() if word in row["interconnect"]), 1.0)
    nics = 8 if gbps >= 1600 else 4 if gbps >= 400 else 1
    return NodeType(gpu, replace(fabric(FABRICS[word]), gpus=per_node, nics=nics, nic=gbps * share / 8 / nics))


def gain_of(row: Row) -> float:
    return FP8 if "fp8" in row["precision"] else 1.0


def shape_of(row: Row) -> ModelShape:
    get = {name: int(number(row, name)) for name in ("n_layers", "hidden", "heads", "kv_heads", "ffn", "vocab", "seq")}
    gated = row["mlp_type"] == "swiglu"
    return ModelShape(
        model_type="llama" if gated else "gpt2", layers=get["n_layers"], hidden=get["hidden"], heads=get["heads"],
        kv_heads=get["kv_heads"] or get["heads"], head_dim=get["hidden"] // get["heads"],
        intermediate=get["ffn"] or 4 * get["hidden"], vocabulary=get["vocab"], positions=get["seq"],
        tied=row["tied_emb"] == "1", attention_bias=not gated, mlp_bias=not gated, gated_mlp=gated,
        experts=int(number(row, "experts")), experts_per_token=int(number(row, "experts_per_token")),
        expert_intermediate=int(number(row, "expert_ffn", get["ffn"])))


def layouts_of(row: Row, layers: int) -> tuple[Layout, ...]:
    names = ("tp", "pp", "vpp", "cp", "dp", "ep", "micro_batch", "global_batch", "seq")
    get = {name: int(number(row, name, 1)) for name in names}
    zero, per_node = int(number(row, "zero")), int(number(row, "gpus_per_node", 8))
    degrees = Degrees(get["tp"], get["pp"], get["dp"], get["cp"], get["ep"])
    microbatches = max(1, round(get["global_batch"] / get["dp"] / get["micro_batch"]))
    word, stages, whole = row["recompute"], get["pp"] * get["vpp"], degrees.data * degrees.context
    inside = re.search("shard group 8|shard within node", row["notes"]) and whole % per_node == 0
    even = [layers // stages + (stage < layers % stages) for stage in range(stages)]
    virtual = get["vpp"] > 1 and microbatches % get["pp"] == 0
    layout = Layout(
        degrees=degrees, samples=get["micro_batch"], sequence=get["seq"], microbatches=microbatches, layers=tuple(even),
        ranks_per_node=per_node, order="PDT",  # as all of these frameworks place ranks
        schedule="interleaved_1f1b" if virtual else "breadth_first" if get["vpp"] > 1 else "1f1b",
        virtual_stages=get["vpp"], zero=zero, shard_degree=1 if zero == 0 else per_node if inside else whole,
        reduce="microbatch" if zero > 1 and get["pp"] == 1 else "step",
        sequence_parallel=row["seq_parallel"] == "1" and get["tp"] > 1,
        recompute="none" if word in ("", "none") else "full" if not word.startswith("selective")
        or word.startswith(HALVES) else "selective",
        precision="fp16" if row["precision"] == "fp16" else "bf16")
    return (replace(layout, recompute="none"), layout) if row["recompute"].startswith(HALVES) else (layout,)


def case_of(row: Row) -> Case:
    shape = shape_of(row)
    return Case(row, layouts_of(row, shape.layers), shape, machine_of(row), row["framework"], row["flash_attn"] != "0")


def key_of(text: str, frameworks: Mapping[str, Framework]) -> str:
    """Return the longest name of a framework that begins a row's; "" for others."""
    return next(name for name in sorted(frameworks, key=len, reverse=True) if text.startswith(name))


def variant(case: Case, framework: Framework) -> Framework:
    """Return the framework as a row uses it: with or without flash attention, which computes in bf16, and torch.compile, which
    fuses passes."""
    compiled = "torch.compile on" in case.row["notes"]
    return replace(framework, flash=case.flash, passes=FUSED if compiled else framework.passes,
                   attention=framework.attention / gain_of(case.row))


def seconds_of(case: Case, framework: Framework, timed: Callable[..., Any] = step_time) -> float:
    own = variant(case, framework)
    times: list[float] = [timed(layout, case.shape, case.machine, own).seconds for layout in case.layouts]
    return sum(times) / len(times)


def tokens_rate(case: Case, seconds: float) -> float:
    layout = case.layouts[0]
    return layout.degrees.data * layout.microbatches * layout.samples * layout.sequence / seconds / layout.ranks


def predict(case: Case, framework: Framework) -> dict[str, Any]:
    row = case.row
    seconds = seconds_of(case, framework)
    own = variant(case, framework)
    peaks = [max(place.total for place in footprint_elsewhere(layout, case.shape, own)) for layout in case.layouts]
    none = 1.0 if len(peaks) == 1 else THIRD if row["recompute"] == "selective-op" else 0.5
    peak = none * peaks[0] + (1 - none) * peaks[-1]
    unit = 2**30 if "GiB" in row["mem_kind"] else 1e9
    without = CONTEXT if "torch" in row["mem_kind"] else 0
    return {"id": row["id"], "source": row["source"], "gpu": row["gpu"], "framework": row["framework"],
            "predicted_tokens_per_s_per_gpu": tokens_rate(case, seconds), "published_tokens_per_s_per_gpu": case.published,
            "predicted_iter_time_s": seconds, "published_iter_time_s": number(row, "iter_time_s") or None,
            "predicted_mem_gb": (peak - without) / unit, "published_mem_gb": number(row, "mem_per_gpu") or None,
            "fits": peak <= case.machine.memory, "ran_out_of_memory": row["oom"] == "1"}


def kendall(pairs: Sequence[tuple[float, float]]) -> float | None:
    """Return Kendall's tau-a of predicted and published numbers, without pairs that were published as equal; None: no pair."""
    signs = [(a[0] - b[0]) * (a[1] - b[1]) for a, b in combinations(pairs, 2) if a[1] != b[1]]
    return sum((sign > 0) - (sign < 0) for sign in signs) / len(signs) if signs else None


def ninth(errors: Sequence[float]) -> float:
    return quantiles(errors, n=10, method="inclusive")[-1] if len(errors) > 1 else max(errors, default=float("nan"))


def summary(rows: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    rates = [(row["predicted_tokens_per_s_per_gpu"], row["published_tokens_per_s_per_gpu"]) for row in rows]
    rates = [(predicted, published) for predicted, published in rates if published]
    signed = [predicted / published - 1 for predicted, published in rates]
    errors = list(map(abs, signed))
    memory = [row for row in rows if row["published_mem_gb"]]
    pairs = [(row["predicted_mem_gb"], row["published_mem_gb"]) for row in memory]
    near = [abs(predicted - published) <= max(6, 0.15 * published) for predicted, published in pairs]
    out = [row for row in rows if row["ran_out_of_memory"]]
    return {"rows": len(rates), "median_error": median(errors) if errors else None,
            "p90_error": ninth(errors) if errors else None, "median_signed": median(signed) if signed else None,
            "kendall": kendall(rates), "memory_rows": len(memory), "memory_near": sum(near), "out_of_memory": len(out),
            "out_of_memory_called": sum(not row["fits"] for row in out),
            "falsely_called": sum(not row["fits"] for row in rows if not row["ran_out_of_memory"])}


def left_out(cases: Sequence[Case], column: str) -> list[dict[str, Any]]:
    """Return predictions with factors fitted to all rows but those with the same source, or the same type of GPU."""
    from calibrate_planner import fitted, line_of

    lines = [(group_of(case, column), line_of(case, FRAMEWORKS)) for case in cases if case.published]
    rows: list[dict[str, Any]] = []
    for group in dict.fromkeys(group_of(case, column) for case in cases):
        frameworks = fitted([line for name, line in lines if name != group])
        own = [case for case in cases if group_of(case, column) == group]
        rows += [predict(case, frameworks[key_of(case.framework, frameworks)]) for case in own]
    return rows


def group_of(case: Case, column: str) -> str:
    return case.row[column].split("-")[0] if column == "gpu" else case.row[column]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--csv", type=Path, required=True)
    parser.add_argument("--core", action="store_true", help="only rows with core=1")
    parser.add_argument("--leave-out", action="store_true")
    parser.add_argument("--json", action="store_true")
    arguments = parser.parse_args()
    with arguments.csv.open(newline="") as file:
        table = [row for row in csv.DictReader(file) if not arguments.core or row["core"] == "1"]
    cases = [case_of(row) for row in table]
    fixed = (predict(case, FRAMEWORKS[key_of(case.framework, FRAMEWORKS)]) for case in cases)
    rows = left_out(cases, "source") if arguments.leave_out else list(fixed)
    names = dict.fromkeys(row["source"] for row in rows)
    sources = {name: summary([row for row in rows if row["source"] == name]) for name in names}
    if arguments.leave_out:
        others = left_out(cases, "gpu")
        for name in dict.fromkeys(group_of(case, "gpu") for case in cases):
            sources[f"{name} left out"] = summary([row for row in others if row["gpu"].split("-")[0] == name])
    if arguments.json:
        print(json.dumps({"all": summary(rows), "sources": sources, "rows": rows}, indent=1))
        return
    for name, figures in {"all": summary(rows), **sources}.items():
        words = (f"{key}={value:.3f}" if isinstance(value, float) else f"{key}={value}" for key, value in figures.items())
        print(f"{name[:48]:48}", *words)


if __name__ == "__main__":
    main()
