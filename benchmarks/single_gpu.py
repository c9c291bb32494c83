"""Training on one GPU: tokens per second, share of the peak and peak memory, beside a plain loop and FSDP2.

    python benchmarks/single_gpu.py --json FILE            # what FILE has already is not measured again
    python benchmarks/single_gpu.py --model "llama 1B" --way ours --way plain --profile

Each measurement is a process of its own. All ways train in bf16 with fp32 masters, fused AdamW and as many tokens; the first
values are normal, the tokens random. ``MFU``: operations of the model (``hpc_mp/layout/models/operations.py``) over the dense
bf16 peak of the data sheet; ``of products``: over what a product of 8192 x 8192 matrices reaches on this GPU.
"""

import argparse
import json
import os
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from statistics import median
from typing import Any, Literal

PEAKS = {"H100": 989e12, "H200": 989e12, "A100": 312e12, "B200": 2250e12, "L40S": 362e12}  # dense bf16, from NVIDIA's data sheets


@dataclass(frozen=True, slots=True)
class Case:
    """A model, and what a step trains: ``microbatches`` of ``samples`` of ``sequence`` tokens."""

    config: dict[str, Any]
    samples: int
    sequence: int
    microbatches: int = 1
    recompute: str = "none"
    ways: tuple[str, ...] = ("ours", "ours compiled", "plain", "plain compiled")


def llama(layers: int, hidden: int, inner: int, heads: int, tied: bool, **more: Any) -> dict[str, Any]:
    return {"model_type": "llama", "num_hidden_layers": layers, "hidden_size": hidden, "intermediate_size": inner,
            "num_attention_heads": heads, "num_key_value_heads": 8, "vocab_size": 128256, "tie_word_embeddings": tied,
            "max_position_embeddings": 131072, "rope_parameters": {"rope_type": "default", "rope_theta": 500000.0}} | more


ONE, THREE = llama(16, 2048, 8192, 32, True), llama(28, 3072, 8192, 24, True)
EIGHT = llama(8, 4096, 14336, 32, False)  # 8 of 32 layers: what fits with its optimizer state
MOE = llama(4, 2048, 7168, 32, False, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, vocab_size=32000)
TINY = llama(2, 64, 128, 8, True, vocab_size=512)
BOTH = ("ours compiled", "plain compiled")
CASES: dict[str, Case] = {
    "tiny": Case(TINY, 2, 64, 2),
    "llama 1B": Case(ONE, 2, 4096, ways=("ours", "ours compiled", "plain", "plain compiled", "fsdp2", "fsdp2 compiled")),
    "llama 1B, 4 microbatches": Case(ONE, 2, 4096, 4, ways=(*BOTH, "fsdp2 compiled")),
    "llama 1B, 32k": Case(ONE, 1, 32768, 1, "full", BOTH),
    "llama 3B": Case(THREE, 1, 4096, 2, ways=(*BOTH, "fsdp2 compiled")),
    "llama 3B, 32k": Case(THREE, 1, 32768, 1, "full", BOTH),
    "llama 8B, 8 layers": Case(EIGHT, 2, 4096, ways=BOTH),
    "mixtral 1.4B": Case(MOE, 2, 4096),
}
WARM_UP, STEPS = 3, 8
Step = Callable[[int], object]
Way = Literal["ours", "ours compiled", "plain", "plain compiled", "fsdp2", "fsdp2 compiled"]


@dataclass(frozen=True, slots=True)
class Measured:
    """Of one process. ``seconds``: of a step, by the device; ``host``: until the host has launched it."""

    model: str
    way: str
    device: str
    tokens: int
    flops: float
    seconds: float
    host: float
    peak: int
    loss: float


def flops_of(case: Case) -> float:
    """Floating-point operations of a step, without recomputation."""
    from hpc_mp.layout.models.operations import training_operations
    from hpc_mp.layout.models.reading import model_shape

    tokens = case.samples * case.sequence * case.microbatches
    return tokens * training_operations(model_shape(case.config, None), case.sequence)


def measure(name: str, way: Way, device_type: str, profile: bool) -> Measured:
    import torch

    case, device = CASES[name], torch.device(device_type)
    torch.manual_seed(0)
    step = ours(case, device, way.endswith("compiled")) if way.startswith("ours") else theirs(case, device, way)
    on_gpu = device.type == "cuda"
    for number in range(WARM_UP):
        last = step(number)
    loss = _loss(last)
    if on_gpu:
        torch.cuda.synchronize()
    seconds, host = [], []
    for number in range(WARM_UP, WARM_UP + STEPS):
        began = time.perf_counter()
        last = step(number)
        host.append(time.perf_counter() - began)
        if on_gpu:
            torch.cuda.synchronize()
        seconds.append(time.perf_counter() - began)
    if profile:
        _profile(step, device)
    peak = torch.cuda.max_memory_allocated() if on_gpu else 0
    tokens = case.samples * case.sequence * case.microbatches
    return Measured(name, way, torch.cuda.get_device_name() if on_gpu else "cpu", tokens,
                    flops_of(case), median(seconds), median(host), peak, loss)


def _loss(last: Any) -> float:
    return float(last.numbers().loss if hasattr(last, "numbers") else last)


def _profile(step: Step, device: Any) -> None:
    """Where the device's time of a step goes, by kernel."""
    from torch.profiler import ProfilerActivity
    from torch.profiler import profile as profiler

    with profiler(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as seen:
        step(99)
        if device.type == "cuda":
            import torch
            torch.cuda.synchronize()
    events = seen.key_averages()
    print(events.table(sort_by="self_device_time_total", row_limit=40, max_name_column_width=90), file=sys.stderr)


def optimizer_settings() -> Any:
    """A job's ``[train]`` table: fused AdamW with clipping, the same for all ways."""
    from hpc_mp.job.spec import Train

    return Train(steps=1000, global_batch=1, learning_rate=1e-4)


def tokens_of(case: Case, device: Any) -> Callable[[int, int], Any]:
    """(step, microbatch) -> tokens, (samples, sequence + 1), on the device."""
    import torch

    generator = torch.Generator().manual_seed(1)
    shape = case.microbatches, case.samples, case.sequence + 1
    drawn = torch.randint(case.config["vocab_size"], shape, generator=generator).to(device)
    return lambda step, microbatch: drawn[microbatch]


def ours(case: Case, device: Any, compiled: bool) -> Step:
    """The engine, as a rank that is alone has it."""
    import torch
    import torch.distributed as dist

    from hpc_mp.layout.layout import Layout
    from hpc_mp.layout.models import FAMILIES
    from hpc_mp.layout.placement import place
    from hpc_mp.layout.schedule_of import schedule_of
    from hpc_mp.train.model.transformers_model import TransformersModel
    from hpc_mp.train.model.transformers_modules import hugging_face_config
    from hpc_mp.train.parallel.communicators import build, everyone
    from hpc_mp.train.parallel.dropout import Moment
    from hpc_mp.train.pipeline.stage import Microbatches
    from hpc_mp.train.step.engine import Engine
    from hpc_mp.train.step.settings import EngineSettings

    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    family = FAMILIES[case.config["model_type"]]
    shape = family.read(case.config)
    layout = Layout(layers=(shape.layers,), samples=case.samples, sequence=case.sequence, microbatches=case.microbatches,
                    precision="bf16", recompute=case.recompute)
    schedule = schedule_of(layout)
    groups = build(place(layout.degrees, "DPT", 1), 1, device, "cpu:gloo,cuda:nccl", schedule, None, everyone())
    settings = EngineSettings(layout, schedule, seed=0, optimizer=optimizer_settings(), compile=compiled)
    model = TransformersModel(hugging_face_config(case.config, family, None, case.recompute), family, shape)
    engine = Engine(model, settings, groups, device)

    def source(weight: Any, box: Any) -> torch.Tensor:
        values = torch.empty([part.stop - part.start for part in box], device=device)
        return values.fill_(1.0) if weight.init == "ones" else values.normal_(0.0, 0.02)

    engine.start(source)
    tokens = tokens_of(case, device)

    def step(number: int) -> object:
        drawn = [tokens(number, microbatch) for microbatch in range(case.microbatches)]
        batches = {(0, microbatch): {"ids": ids[:, :-1], "labels": ids[:, 1:]} for microbatch, ids in enumerate(drawn)}
        moments = [Moment(number, tuple(range(case.samples)))] * case.microbatches
        return engine.step(number, Microbatches(batches, moments, case.microbatches * case.samples * case.sequence))

    return step


def theirs(case: Case, device: Any, way: Way) -> Step:
    """transformers' model: alone under autocast, or cut by FSDP2 over one rank, with its mixed precision."""
    import torch
    import torch.distributed as dist
    from torch.distributed.fsdp import MixedPrecisionPolicy, fully_shard
    from transformers import AutoConfig, AutoModelForCausalLM

    values = {key: value for key, value in case.config.items() if key != "model_type"}
    config = AutoConfig.for_model(case.config["model_type"], **values)
    with device:
        model = AutoModelForCausalLM.from_config(config, attn_implementation="sdpa", dtype=torch.float32)
    model.train()
    if case.recompute == "full":
        model.gradient_checkpointing_enable(gradient_checkpointing_kwargs={"use_reentrant": False})
    layers = model.model.layers
    if way.endswith("compiled"):
        for layer in layers:
            layer.compile()
    cut = way.startswith("fsdp2")
    if cut:
        dist.init_process_group("nccl" if device.type == "cuda" else "gloo", store=dist.HashStore(), rank=0, world_size=1)
        policy = MixedPrecisionPolicy(torch.bfloat16, torch.float32)
        for layer in layers:
            fully_shard(layer, mp_policy=policy)
        fully_shard(model, mp_policy=policy)
    settings = optimizer_settings()
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps,
                                  weight_decay=settings.weight_decay, fused=True)
    tokens = tokens_of(case, device)

    def step(number: int) -> object:
        total = torch.zeros((), device=device)
        for microbatch in range(case.microbatches):
            drawn = tokens(number, microbatch)
            with torch.autocast(device.type, torch.bfloat16, enabled=not cut):
                logits = model(drawn[:, :-1], use_cache=False).logits
            loss = torch.nn.functional.cross_entropy(logits.float().flatten(0, 1), drawn[:, 1:].flatten()) / case.microbatches
            del logits
            loss.backward()
            total += loss.detach()
        torch.nn.utils.clip_grad_norm_(model.parameters(), settings.clip)
        optimizer.step()
        optimizer.zero_grad()
        return total

    return step


def ceiling(device: Any) -> float:
    """Floating-point operations per second of a large bf16 product."""
    import torch

    size = 8192
    left, right = (torch.randn(size, size, device=device, dtype=torch.bfloat16) for _ in range(2))
    for _ in range(5):
        left @ right
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(50):
        left @ right
    torch.cuda.synchronize()
    return 2 * size ** 3 * 50 / (time.perf_counter() - began)


def one(name: str, way: Way, device: str, profile: bool) -> Measured | str:
    """A measurement in a process of its own, or what it died of."""
    command = [sys.executable, __file__, "--measure", json.dumps([name, way, device, profile])]
    environment = os.environ | {"PYTORCH_ALLOC_CONF": "expandable_segments:True"}
    done = subprocess.run(command, env=environment, capture_output=True, text=True, check=False, timeout=300)
    if profile:
        print(done.stderr, file=sys.stderr)
    if done.returncode:
        return (done.stderr.strip().splitlines() or ["no word"])[-1][:300]
    return Measured(**json.loads(done.stdout.splitlines()[-1]))


def line(found: Measured, peak: float, product: float) -> str:
    rate = found.flops / found.seconds
    return (f"{found.model:26} {found.way:15} {found.seconds * 1000:8.1f} ms  {found.tokens / found.seconds:9.0f} tokens/s  "
            f"MFU {rate / peak:5.1%}  of products {rate / product:5.1%}  host {found.host * 1000:7.1f} ms  "
            f"peak {found.peak / 2**30:5.1f} GiB  loss {found.loss:.3f}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", action="append", choices=CASES, help="only these (repeatable)")
    parser.add_argument("--way", action="append", choices=Way.__args__, help="only these (repeatable)")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--minutes", type=float, default=8.0, help="begin no measurement after so long")
    parser.add_argument("--profile", action="store_true", help="print the kernels of a step")
    parser.add_argument("--json", type=Path, help="results, of which those that are there are not measured again")
    parser.add_argument("--measure", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.measure:
        print(json.dumps(asdict(measure(*json.loads(arguments.measure)))), flush=True)
        os._exit(0)
    plan = [(model, way) for model in arguments.model or list(CASES)[1:] for way in arguments.way or CASES[model].ways]
    import torch

    if arguments.device == "cuda" and not torch.cuda.is_available():
        print(f"torch {torch.__version__} sees no GPU here (--device cpu --model tiny tries the script). On one, it measures")
        print("\n".join(f"    {model:26} {way}" for model, way in plan))
        return
    on_gpu = arguments.device == "cuda"
    name = torch.cuda.get_device_name() if on_gpu else "cpu"
    peak = next((value for key, value in PEAKS.items() if key in name), float("nan"))
    product = ceiling(torch.device("cuda")) if on_gpu else float("nan")
    print(f"{name}, torch {torch.__version__}: products reach {product / 1e12:.0f} TFLOP/s of {peak / 1e12:.0f}", flush=True)
    file: Path | None = arguments.json
    known = json.loads(file.read_text())["results"] if file and file.exists() else []
    results = {(each["model"], each["way"]): Measured(**each) for each in known if each["device"] == name}
    end = time.monotonic() + 60 * arguments.minutes
    left = [each for each in plan if each not in results]
    while left and time.monotonic() < end:
        model, way = left.pop(0)
        found = one(model, way, arguments.device, arguments.profile)
        print(f"{model:26} {way:15} {found}" if isinstance(found, str) else line(found, peak, product), flush=True)
        if isinstance(found, Measured):
            results[model, way] = found
        if file:
            file.write_text(json.dumps({"device": name, "torch": torch.__version__, "peak": peak, "product": product,
                                        "results": [asdict(each) for each in results.values()]}, indent=1) + "\n")
    for model, way in left:
        print(f"{model:26} {way:15} not measured: the time is over", flush=True)


if __name__ == "__main__":
    main()
