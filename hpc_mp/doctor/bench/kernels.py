"""Rows of the catalogue, for the planner: what this machine reaches in a training's kernels, and between ranks over gloo."""

import os
import statistics
import sys
from typing import Any

import psutil

from hpc_mp.base.errors import RunFailed
from hpc_mp.catalogue import catalogue
from hpc_mp.cluster.slurm.allocation import Where
from hpc_mp.doctor.bench.plan import BenchRequest, plan
from hpc_mp.doctor.bench.result import row
from hpc_mp.doctor.compute.device import cpu_name
from hpc_mp.doctor.compute.workers import devices_here, measure

COMMAND = (sys.executable, "-P", "-m", "hpc_mp.doctor.compute.kernels")
SECONDS, SMALL, LARGE = 2.0, 2**10, 2**24  # of each kernel at most; bytes of messages between ranks
DIGITS = 4
Rows = dict[str, dict[str, dict[str, Any]]]  # owner → name → figures, as in machines.toml


def measured_rows(ranks: int | None, node_rate: float | None) -> Rows:
    """Measure all devices at the same time and return the rows of their model. Raises RunFailed.

    Args:
        ranks: number of ranks of a node without GPUs. Default: 2. Each has ``OMP_NUM_THREADS`` processors, else 1.
        node_rate: GB/s of the network of a node without GPUs. Default: as between ranks of a node, as on emulated nodes.
    """
    devices = devices_here()
    if devices == ("cpu",):
        return _processors(ranks or 2, node_rate)
    rates = _rates(devices)
    model, main = catalogue().gpu(rates.pop("kind")), next(name for name in ("bf16", "fp16") if name in rates)
    peak = (model.peak_tflops.get(main) if model else None) or rates[main]
    like = {"like": model.name} if model else {}
    return {"gpu": {model.name if model else "NAME": like | _figures(rates, peak, main)}}


def _rates(devices: tuple[str, ...]) -> dict[str, Any]:
    """Return the medians over the devices."""
    results = measure(devices, SECONDS, COMMAND, environ={"OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS", "1")})
    if failed := next((result for result in results if result.error or not result.rates), None):
        raise RunFailed(f"{failed.device}: {failed.error or 'no figures'}")
    rates = {name: statistics.median(result.rates[name] for result in results) for name in results[0].rates}
    return {"kind": results[0].kind, **rates}


def _figures(rates: dict[str, float], peak: float, main: str) -> dict[str, float]:
    return {"products_share": round(rates[main] / peak, DIGITS), "attention_share": round(rates["attention"] / peak, DIGITS),
            "wave": round(rates["wave"]), "launch_us": round(rates["launch_us"], 1)}


def _processors(ranks: int, node_rate: float | None) -> Rows:
    rates = _rates(("cpu",) * ranks)
    request = BenchRequest("sendrecv", "gloo", 1, max(2, ranks), sizes=(SMALL, LARGE, LARGE // SMALL, None))
    chosen = plan(request, Where("local", "on this machine"))
    small, large = (row(chosen.spec, event["size"], event["ranks"]) for event in chosen.start() if event["event"] == "row")
    link, hop = large.median, 1e6 * SMALL / 1e9 / small.median
    memory = psutil.virtual_memory().total >> 20
    gpu = {"title": f"{cpu_name()}, one rank of {ranks}", "vendor": "cpu", "memory_mib": memory // ranks,
           "memory_gbs": round(rates["memory"], DIGITS), "nvlinks": 1, "nccl_link_gbs": round(link, DIGITS),
           "ll_gbs": round(link, DIGITS), "peak_tflops": {name: round(rates[name], DIGITS) for name in ("fp32", "fp64")},
           **_figures(rates, rates["fp32"], "fp32")}
    machine = {"vcpus": os.cpu_count(), "memory_gib": memory >> 10, "numa": 1, "gpus": ranks, "gpu": cpu_name(), "nics": 1,
               "rdma_gbps": round(8 * (node_rate or link), DIGITS), "hop_us": round(hop, 1)}
    return {"gpu": {cpu_name(): gpu}, "site": {"processors": machine}}
