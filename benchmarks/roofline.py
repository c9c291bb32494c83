"""A modelled roofline of one optimizer step on H100s, counted without a GPU, with ``train.compile`` and without.

    python benchmarks/roofline.py [--case "llama 1B"] [--way compiled] [--kernels]

The real engine runs on torch's meta device with its branches for GPUs (``tests/support/meta_device.py``). Each kernel of the
second step takes the longest of its products at ``PEAK * EFFICIENCY``, its bytes at ``BANDWIDTH``, and ``LAUNCH``. Compiled
graphs go through AOT autograd's partitioner, inductor's passes behind it, its lowering for an H100, and its scheduler, which
decides what is fused and how many bytes each kernel reads and writes; no kernel is generated. Attention takes its operations at
a published throughput. Messages take their bytes at ``NVLINK``: the engine waits at once for those of experts; those of the data
axis run in the background and are listed outside of the sum. Experts get equal shares of the rows. No host is late: a step is
the sum of its kernels.

``MFU`` is that of ``single_gpu.py``: operations of the model without recomputation over the dense bf16 peak. The model is faster
than the H100 of docs/user/gpu.md, or slower, by this much (with loss chunks of 2^27, as there): 163 ms for 1B, whose kernels took
159; 587 ms for 4 microbatches of it, which took 607; 383 ms for 3B with 2 microbatches, which took 407.
"""

import copy
import json
import sys
import tempfile
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import partial
from importlib import import_module
from itertools import product
from multiprocessing import get_context
from pathlib import Path
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
import torch.nn.functional as F
from single_gpu import ONE, THREE, Case, flops_of, llama
from torch import Tensor
from torch._dynamo.backends.common import aot_autograd
from torch._functorch.aot_autograd import make_boxed_func
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch._guards import detect_fake_mode
from torch._inductor import compile_fx, ir, scheduler
from torch._inductor.debug import DebugContext
from torch._inductor.decomposition import select_decomp_table
from torch._inductor.fx_passes import reinplace
from torch._inductor.graph import GraphLowering
from torch._inductor.runtime.hints import DeviceProperties
from torch._inductor.virtualized import V
from torch.fx.node import map_arg
from torch.fx.passes.fake_tensor_prop import FakeTensorProp
from torch.utils._python_dispatch import _disable_current_modes
from torch.utils._pytree import tree_leaves
from torch.utils.flop_counter import flop_registry, register_flop_formula

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "tests/support"))
from meta_device import MetaFinder, Waits, step, without_gpu

PEAK = 989e12  # dense bf16, data sheet of the H100 SXM
EFFICIENCY = 0.70  # of products: the products of the 1B step ran at 700 TFLOP/s, docs/user/gpu.md
BANDWIDTH = 2.7e12  # of 3.35e12 on the data sheet; 1B's AdamW moved 39.6 GB in 15 ms, docs/user/gpu.md
LAUNCH = 2.5e-6  # the shortest kernel
NVLINK = 330e9  # of 450e9 in each direction: assumed, not measured
LATENCY = 15e-6  # of a message: assumed
# Head size -> operations per second of cuDNN's causal attention, forward and backward, with 4,096 tokens. Forwards: figure 5 of
# FlashAttention-3, arXiv:2407.08608. Backwards: 64 from the 24 ms in docs/user/gpu.md, 128 in proportion to the forwards.
ATTENTION: Mapping[int, tuple[float, float]] = {64: (363e12, 307e12), 128: (518e12, 438e12)}
H100 = DeviceProperties("cuda", 0, 132, 90, 9, 65536, 2048, 1024, 32)
PROPERTIES = SimpleNamespace(total_memory=80 << 30, gcnArchName="", major=9, minor=0, multi_processor_count=132)

# 46.7e9 parameters with 18 bytes of state each do not fit into 8 GPUs of 80 GB: 8 of 32 layers.
MIXTRAL = llama(8, 4096, 14336, 32, False, model_type="mixtral", num_local_experts=8, num_experts_per_tok=2, vocab_size=32000)
# Name -> case, ranks, degrees. Those of 3B with 2 samples need more than 80 GB, or recomputation, which is not modelled here.
ROWS = {"llama 1B": (Case(ONE, 2, 4096), 1, {}), "llama 1B, 8 microbatches": (Case(ONE, 2, 4096, 8), 1, {}),
        "llama 3B": (Case(THREE, 2, 4096), 1, {}), "llama 3B, 8 microbatches": (Case(THREE, 2, 4096, 8), 1, {}),
        "mixtral 8x7B, 8 layers": (Case(MIXTRAL, 2, 4096), 8, {"expert": 8, "zero": 1}),
        "mixtral 8x7B, 8 layers, 8 microbatches": (Case(MIXTRAL, 2, 4096, 8), 8, {"expert": 8, "zero": 1}),
        "llama 1B, 4 microbatches, as measured": (Case(ONE, 2, 4096, 4), 1, {}),
        "llama 3B, 2 microbatches, as measured": (Case(THREE, 1, 4096, 2), 1, {})}
WAYS = "compiled", "uncompiled"
JOB = """
[job]
name = "roofline"
directory = "runs"
device = "cuda"
[model]
config = {config}
[data]
files = ["text.jsonl"]
sequence_length = {case.sequence}
[train]
steps = 3
global_batch = {batch}
precision = "bf16"
learning_rate = 1e-4
compile = {compiled}
[parallel]
microbatches = {case.microbatches}
recompute = "{case.recompute}"
"""

PRODUCTS, ELEMENTWISE, SUMS, EXPERT_ROWS = "products", "elementwise", "sums of weight gradients", "rows of experts"
BEHIND = "messages in the background"
# Beginning of the name of a function of the engine -> the class of the kernels that it launches itself.
CLASSES = {"_squared_norm": "norm", "Optimizer.squared_norm": "norm", "Optimizer.step": "optimizer",
           "DataAxis.publish": "publish", "NextToken": "loss", "_CrossEntropy": "loss", "Sink": SUMS, "UnitGradient": SUMS,
           "add_grouped_outer": SUMS, "Dispatch": EXPERT_ROWS, "dispatch": EXPERT_ROWS, "Journey": EXPERT_ROWS,
           "ExpertAxis": EXPERT_ROWS}
# Operators that only write, and those that touch only the rows of an index: (times, argument with the rows; None: the result).
WRITERS = ("zero_", "fill_", "zeros", "new_zeros", "zeros_like", "ones", "ones_like", "full", "full_like", "arange")
INDEXED: Mapping[str, tuple[int, int | None]] = {"embedding": (2, None), "index": (2, None), "gather": (2, None),
                                                "index_put_": (3, 2), "index_copy_": (2, 3), "scatter_": (2, 3)}


@dataclass(frozen=True, slots=True)
class Kernel:
    """A kernel: its class, the operator or the kernel of inductor, and its costs. ``kind``: empty if its caller decides."""

    kind: str
    name: str
    bytes: float
    flops: float
    seconds: float


@torch.library.custom_op("roofline::attention", mutates_args=())
def attention(query: Tensor, key: Tensor, value: Tensor) -> Tensor:
    """Stand for fused causal attention. query: (batch, heads, tokens, head size); keys and values may have fewer heads."""
    return torch.empty_like(query)


@torch.library.custom_op("roofline::attention_backward", mutates_args=())
def attention_backward(gradient: Tensor, query: Tensor, key: Tensor, value: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    return torch.empty_like(query), torch.empty_like(key), torch.empty_like(value)


def register_operations() -> None:
    """Register the shapes, gradients and operations of attention, and the operations of grouped products."""
    attention.register_fake(lambda query, key, value: torch.empty_like(query))
    attention_backward.register_fake(lambda gradient, *inputs: tuple(map(torch.empty_like, inputs)))
    attention.register_autograd(lambda ctx, gradient: attention_backward(gradient, *ctx.saved_tensors),
                                setup_context=lambda ctx, inputs, output: ctx.save_for_backward(*inputs))
    # Two products forward and five backward, of which causal attention needs half.
    register_flop_formula(torch.ops.roofline.attention)(lambda query, *_, **__: _scores(query) * 2)
    register_flop_formula(torch.ops.roofline.attention_backward)(lambda gradient, *_, **__: _scores(gradient) * 5)
    register_flop_formula(torch.ops.aten._grouped_mm)(lambda left, right, *_, **__: 2 * left[0] * left[1] * right[-1])


def _scores(shape: Sequence[int]) -> int:
    """Return the operations of one product of causal attention."""
    batch, heads, tokens, size = shape
    return batch * heads * tokens * tokens * size


def tensors(values: Any) -> list[Tensor]:
    """Return the distinct tensors among values."""
    return [*{id(leaf): leaf for leaf in tree_leaves(values) if isinstance(leaf, Tensor)}.values()]


def size(values: Sequence[Tensor]) -> int:
    """Return the bytes of tensors; an expanded tensor has those of its storage."""
    return sum(min(tensor.nbytes, tensor.untyped_storage().nbytes()) for tensor in values)


def traffic(name: str, args: Sequence[Any], inputs: Sequence[Tensor], outputs: Sequence[Tensor]) -> int:
    """Return the bytes that an operator reads and writes."""
    if name in WRITERS:
        return size(outputs)
    if name in INDEXED:
        times, argument = INDEXED[name]
        return times * size(outputs if argument is None else [args[argument]])
    if name == "_fused_adamw_":
        return 2 * size(inputs)  # gradients too: the kernel writes them back if they have a scale
    return size(inputs) + size(outputs) - (size(inputs[:1]) if name == "copy_" else 0)


def kernel(function: Any, args: Sequence[Any], kwargs: Mapping[str, Any], result: Any) -> Kernel:
    """Return the kernel of an operator."""
    packet, name = function.overloadpacket, function.name().partition("::")[2].partition(".")[0]
    inputs, outputs = tensors((args, kwargs)), tensors(result)
    moved = traffic(name, args, inputs, outputs)
    factors = [argument for argument in args if isinstance(argument, Tensor)]
    flops = flop_registry[packet](*factors, out_val=result) if packet in flop_registry else 0
    if function.namespace == "roofline":
        rate = ATTENTION[inputs[0].shape[-1]][name == "attention_backward"]
        return Kernel("attention", name, moved, flops, flops / rate)
    return Kernel(PRODUCTS if flops else "", name, moved, flops, max(flops / (PEAK * EFFICIENCY), moved / BANDWIDTH, LAUNCH))


def message(function: Any, args: Sequence[Any]) -> Kernel:
    """Return a message as a kernel."""
    from hpc_mp.train.dry_run.recorder import MESSAGES
    kind = MESSAGES[function.name()]
    group = dist.ProcessGroup.unbox(next(
        argument for argument in args if isinstance(argument, torch.ScriptObject) and "ProcessGroup" in str(argument._type())))
    sent = kind.share(group.size()) * size(tensors(args[kind.argument]))
    waits = kind.name == "all-to-all" or sent < 1 << 20
    return Kernel("messages" if waits else BEHIND, kind.name, sent, 0, sent / NVLINK + LATENCY)


class Roof(Waits):
    """Counts the kernels of a step where ``Waits`` counts what makes the host wait."""

    @classmethod
    def ignore_compile_internals(cls) -> bool:
        return True

    def note(self, what: str) -> None: ...

    def add(self, *kernels: Kernel) -> None:
        """Count kernels, in the class of the function of the engine that launches them."""
        for one in kernels:
            self.counts[replace(one, kind=one.kind or self._class())] += 1

    def _class(self) -> str:
        frame = sys._getframe(2)
        while frame is not None:
            name = frame.f_code.co_qualname
            if kind := CLASSES.get(name) or CLASSES.get(name.partition(".")[0]):
                return kind
            frame = frame.f_back
        return ELEMENTWISE

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = super().__torch_dispatch__(function, types, args, kwargs)
        inputs, outputs = tensors((args, kwargs)), tensors(result)
        memory = {tensor.untyped_storage()._cdata for tensor in inputs}
        computes = function._schema.is_mutable or any(tensor.untyped_storage()._cdata not in memory for tensor in outputs)
        if function.namespace == "c10d":
            self.add(message(function, args))
        elif computes and "empty" not in function.name() and any(tensor.is_meta for tensor in (*inputs, *outputs)):
            self.add(kernel(function, args, kwargs or {}, result))
        return result


def compiler(roof: Roof, graph: torch.fx.GraphModule, inputs: Sequence[Any], backward: bool = False) -> Callable[..., Any]:
    """Return a graph that counts inductor's kernels where it runs."""
    kernels, runnable = [*lowered(copy.deepcopy(graph), inputs, backward)], graph

    def run(*args: Any) -> Any:
        roof.add(*kernels)
        with _disable_current_modes():
            return runnable(*args)

    return make_boxed_func(run)


def lowered(graph: torch.fx.GraphModule, inputs: Sequence[Any], backward: bool) -> Iterator[Kernel]:
    """Yield the kernels of a graph by inductor's scheduler for an H100. The graph of the meta device becomes one of ``cuda``."""
    mode, device = detect_fake_mode(inputs), torch.device("cuda", 0)
    for node in graph.graph.nodes:
        if "device" in node.kwargs:
            node.kwargs = node.kwargs | {"device": device}
    with mode:
        fakes = [torch.empty_strided(value.shape, value.stride(), dtype=value.dtype, device=device)
                 if isinstance(value, Tensor) else value for value in inputs]
    with torch.no_grad(), V.set_fake_mode(mode), V.set_debug_handler(DebugContext()), V.set_extern_kernel_nodes([]):
        compile_fx.view_to_reshape(graph)
        FakeTensorProp(graph, mode=mode).propagate_dont_convert_inputs(*fakes)
        compile_fx._recursive_post_grad_passes(graph, is_inference=False)
        lowering = GraphLowering(graph, example_inputs=fakes, is_backward=backward)
        with V.set_graph_handler(lowering):
            lowering.run(*fakes)
            lowering._update_scheduler()
            for node in lowering.scheduler.nodes:
                if node.is_extern() and not isinstance(node.node, ir.MultiOutput):
                    origin = next(source for source in node.node.origins if source.target is node.node.op_overload
                                  or getattr(source.target, "overloadpacket", None) in flop_registry)
                    args, kwargs = map_arg((origin.args, origin.kwargs), lambda argument: argument.meta["val"])
                    yield kernel(origin.target, args, kwargs, origin.meta["val"])
                elif not node.is_extern() and (moved := node.get_read_write_buffers_sizes()):
                    yield Kernel("", node.get_name(), moved, 0, max(moved / BANDWIDTH, LAUNCH))


def table(value: Any) -> str:
    """Return a value as TOML."""
    if isinstance(value, Mapping):
        return "{" + ", ".join(f"{key} = {table(item)}" for key, item in value.items()) + "}"
    return json.dumps(value)


def static(compile_: Callable[..., Any], backend: Callable[..., Any]) -> Callable[..., Any]:
    """Compile with a backend for sizes that are known: bytes of a graph for any size have no number."""
    return lambda function, **keys: compile_(function, **keys | {"backend": backend, "dynamic": False})


def kernels_of(case: Case, ranks: int, degrees: Mapping[str, int], compiled: bool) -> Mapping[Kernel, int]:
    """Return the kernels of the second step of the first rank."""
    roof = Roof()
    without_gpu(roof)
    backend = aot_autograd(fw_compiler=partial(compiler, roof), bw_compiler=partial(compiler, roof, backward=True),
                           partition_fn=partial(min_cut_rematerialization_partition, compiler="inductor"),
                           decompositions=select_decomp_table())
    torch._dynamo.reset()
    with ExitStack() as changes:
        for change in (patch.object(F, "scaled_dot_product_attention", lambda q, k, v, **_: attention(q, k, v)),
                       patch.object(import_module("hpc_mp.train.parallel.expert_axis"), "FakeTensor", Tensor),  # equal shares
                       patch.object(torch, "compile", static(torch.compile, backend)),
                       patch.object(reinplace, "canonicalize_view_scatter_ops", lambda graph: None),  # it runs copies
                       patch.object(scheduler, "has_triton", lambda: True),
                       patch.object(DeviceProperties, "create", lambda device: H100),
                       patch.object(torch.cuda, "get_device_properties", lambda device: PROPERTIES)):
            changes.enter_context(change)
        file = Path(changes.enter_context(tempfile.TemporaryDirectory())) / "job.toml"
        batch = case.samples * case.microbatches * ranks
        file.write_text(JOB.format(config=table(case.config), case=case, batch=batch, compiled=str(compiled).lower()))
        overrides = [f"job.ranks_per_node={ranks}", *(f"parallel.{key}={value}" for key, value in degrees.items())]
        return step(file, overrides, False, roof)


def report(name: str, case: Case, kernels: Mapping[Kernel, int], every: bool) -> None:
    seconds = sum(one.seconds * count for one, count in kernels.items() if one.kind != BEHIND)
    share = flops_of(case) / PEAK / seconds
    print(f"{name}: {seconds * 1e3:.1f} ms, {sum(kernels.values()):,} kernels, MFU {share:.1%}", flush=True)
    for label in sorted({one.kind for one in kernels}, key=lambda label: -_sum(kernels, label, "seconds")):
        count = sum(number for one, number in kernels.items() if one.kind == label)
        print(f"    {label:<28}{_sum(kernels, label, 'seconds') * 1e3:9.1f} ms {_sum(kernels, label, 'bytes') / 1e9:9.1f} GB "
              f"{_sum(kernels, label, 'flops') / 1e12:9.1f} TFLOP {count:8,} kernels")
        for one in sorted(kernels, key=lambda one: -one.seconds * kernels[one]) if every else ():
            if one.kind == label and one.seconds * kernels[one] > 1e-4:
                print(f"        {kernels[one]:6,} x {one.seconds * 1e6:8.1f} us {one.bytes / 1e6:9.1f} MB  {one.name[:80]}")


def _sum(kernels: Mapping[Kernel, int], label: str, what: str) -> float:
    return sum(getattr(one, what) * count for one, count in kernels.items() if one.kind == label)


@click.command()
@click.option("--case", "cases", multiple=True, type=click.Choice([*ROWS]), help="only these (repeatable)")
@click.option("--way", "ways", multiple=True, type=click.Choice(WAYS), help="only these (repeatable)")
@click.option("--kernels", "every", is_flag=True, help="list the kernels that take more than 0.1 ms of a step")
def main(cases: Sequence[str], ways: Sequence[str], every: bool) -> None:
    sys.meta_path.insert(0, MetaFinder())
    register_operations()
    for name, way in product(cases or ROWS, ways or WAYS):
        process = get_context("fork").Process(target=modelled, args=(name, way, every))  # whose memory goes with it
        process.start()
        process.join()
        if process.exitcode:
            sys.exit(f"{name}, {way}: the process ended with {process.exitcode}")


def modelled(name: str, way: str, every: bool) -> None:
    """Print the report of one case."""
    case, ranks, degrees = ROWS[name]
    report(f"{name}, {way}", case, kernels_of(case, ranks, degrees, way == "compiled"), every)


if __name__ == "__main__":
    main()
