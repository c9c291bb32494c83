"""``python -m hpc_mp.doctor.compute.kernels DEVICE SECONDS``: what a training's kernels reach on one device, for the planner.

It answers like ``program.py``; the phase "load" has the figures. A product of m × k and k × n numbers takes
2 k (m n + wave) / rate + launch; the three are fitted to the least relative error of several sizes.
"""

import json
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from itertools import product
from typing import Any

import numpy as np
import torch
from torch.nn import functional

from hpc_mp.doctor.compute.device import cpu_kind
from hpc_mp.planner.frameworks import OURS
from hpc_mp.planner.step import STREAM

TOKENS, WIDTHS = (64, 512, 2048), ((512, 512), (512, 2048), (2048, 512), (1536, 1536))  # on a CPU; a GPU gets 4 × the widths
TYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16, "fp64": torch.float64}
HEADS, HEAD, SEQUENCE = 8, 64, 1024  # of the attention


def main(arguments: Sequence[str]) -> int:
    """Answer each phase on standard input with a line of JSON."""
    device, seconds = torch.device(arguments[0]), float(arguments[1])
    kind = cpu_kind() if device.type == "cpu" else torch.cuda.get_device_name(device)
    print(json.dumps({"kind": kind, "software": f"torch {torch.__version__}", "bus": ""}), flush=True)
    for line in sys.stdin:
        print(json.dumps({"rates": dict(figures(device, seconds))} if line.strip() == "load" else {}), flush=True)
    return 0


def figures(device: torch.device, seconds: float) -> Iterator[tuple[str, float]]:
    """Yield the TFLOP/s of products by type, with the wave and the launch of the first type; of attention; GB/s of passes."""
    first, *others = ("fp32", "fp64") if device.type == "cpu" else ("bf16", "fp16", "fp32")
    rate, wave, launch = fitted([(m, n, k, timed(_product(device, first, m, n, k), seconds)) for m, n, k in _sizes(device)])
    yield from {first: rate / 1e12, "wave": wave, "launch_us": launch * 1e6}.items()
    m, n, k = max(_sizes(device))
    for name in others:
        yield name, 2 * m * n * k / timed(_product(device, name, m, n, k), seconds) / 1e12
    heads = torch.randn(1, HEADS, SEQUENCE, HEAD, device=device, dtype=TYPES[first])
    attention = timed(lambda: functional.scaled_dot_product_attention(heads, heads, heads, is_causal=True), seconds)
    yield "attention", 2 * HEADS * HEAD * SEQUENCE**2 / attention / 1e12
    yield "memory", _passes(device, TYPES[first], seconds) / 1e9


def fitted(times: Sequence[tuple[int, int, int, float]]) -> tuple[float, float, float]:
    """Return rate, wave and launch from the (m, n, k, seconds) of products."""
    m, n, k, seconds = (np.array(column, float) for column in zip(*times, strict=True))
    columns = np.stack([2 * m * n * k, 2 * k, np.ones_like(k)], 1) / seconds[:, None]
    terms, factors = [0, 1, 2], np.zeros(3)
    while (factors := np.linalg.lstsq(columns[:, terms], np.ones_like(k), rcond=None)[0]).min() < 0:
        terms.remove(terms[int(factors.argmin())])
    work, wave, launch = (dict(zip(terms, map(float, factors), strict=True)).get(column, 0.0) for column in range(3))
    return 1 / work, wave / work, launch


def timed(kernel: Callable[[], object], seconds: float) -> float:
    """Return the median of the seconds that a kernel takes."""
    wait: Callable[[], object] = torch.cuda.synchronize if torch.cuda.is_available() else lambda: None
    kernel()
    wait()
    end, times = time.perf_counter() + seconds / 10, list[float]()
    while len(times) < 3 or time.perf_counter() < end:
        begin = time.perf_counter()
        kernel()
        wait()
        times.append(time.perf_counter() - begin)
    return float(np.median(times))


def _sizes(device: torch.device) -> list[tuple[int, int, int]]:
    larger = 1 if device.type == "cpu" else 4
    return [(m, larger * n, larger * k) for m, (n, k) in product(TOKENS, WIDTHS)]


def _product(device: torch.device, name: str, m: int, n: int, k: int) -> Callable[[], Any]:
    left, right = torch.randn(m, k, device=device).to(TYPES[name]), torch.randn(k, n, device=device).to(TYPES[name])
    return lambda: left @ right


def _passes(device: torch.device, dtype: torch.dtype, seconds: float) -> float:
    """Return bytes per second of the planner's memory, at which its formula gives the time of a layer's element-wise passes."""
    tokens, hidden, inner = 512, 1024, 4096
    x, gate = torch.randn(tokens, hidden, device=device, dtype=dtype), torch.randn(tokens, inner, device=device, dtype=dtype)
    weight = torch.ones(hidden, device=device, dtype=dtype)

    def layer() -> Any:
        return [functional.rms_norm(x + x, (hidden,), weight), functional.rms_norm(x + x, (hidden,), weight),
                functional.silu(gate) * gate]

    return OURS.passes * (10 * tokens * hidden + 3 * tokens * inner) * x.element_size() / timed(layer, seconds) / STREAM


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
