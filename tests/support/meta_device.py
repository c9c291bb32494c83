"""A rank's real engine on torch's meta device, with the branches for GPUs: no GPU is needed, and no memory.

Tensors of the meta device have shapes without values. They take the place of those on a GPU: while ``hpc_mp.train`` is imported,
its branches for ``cuda`` become branches for ``meta``, and the streams and events of torch.cuda do nothing. A kernel that gets
tensors of the host and of the device raises, as on a GPU. What makes the host wait is noted: values that it asks for, copies that
block, and waits for events. As a program: reads cases, one JSON line each, and prints what each of them did.
"""

import importlib.abc
import importlib.machinery
import importlib.util
import json
import sys
import tempfile
import traceback
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from types import CodeType, ModuleType, SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from torch.optim import optimizer, sgd
from torch.utils._python_dispatch import TorchDispatchMode

META, CPU = torch.device("meta"), "cpu"
HERE = "hpc_mp.train"
KERNELS = torch.library.Library("aten", "IMPL")
VALUES = ("_local_scalar_dense", "nonzero", "masked_select", "unique", "bincount", "is_nonzero", "aten.equal")


class MetaSource(importlib.machinery.SourceFileLoader):
    """Loads a module's source with ``meta`` in place of ``cuda`` where the kind of a device is asked for."""

    def get_code(self, fullname: str) -> CodeType:
        source = Path(self.path).read_text().replace('"cuda"', '"meta"').replace(".is_cuda", ".is_meta")
        return compile(source, self.path, "exec", dont_inherit=True)


class MetaFinder(importlib.abc.MetaPathFinder):
    """Finds the modules of the rank half."""

    def find_spec(self, name: str, path: Any, target: ModuleType | None = None) -> Any:
        spec = importlib.machinery.PathFinder.find_spec(name, path) if name.startswith(HERE) else None
        if spec is not None and spec.origin is not None:
            spec.loader = MetaSource(name, spec.origin)
        return spec


class Waits(TorchDispatchMode):
    """Notes what makes the host wait, and where. Values that it asks for are 1."""

    def __init__(self) -> None:
        super().__init__()
        self.counts: Counter[str] = Counter()

    def note(self, what: str) -> None:
        frames = [frame for frame in traceback.extract_stack() if "/hpc_mp/train/" in frame.filename]
        place = " < ".join(f"{Path(frame.filename).name}:{frame.lineno}" for frame in reversed(frames[-2:]))
        self.counts[f"{what} at {place}"] += 1

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        name, tensors = str(function), [argument for argument in args if isinstance(argument, torch.Tensor)]
        here = tensors[0].device.type if tensors else CPU
        if any(value in name for value in VALUES) and any(tensor.is_meta for tensor in tensors):
            self.note(f"{name} asks for values")
            if "_local_scalar_dense" in name:
                return 1
        if name.startswith("aten._to_copy") and here != torch.device(kwargs.get("device") or here).type:
            self._copied(kwargs.get("non_blocking", False))
            if here == META.type:
                return torch.zeros(tensors[0].shape, dtype=kwargs.get("dtype") or tensors[0].dtype)
        if name.startswith("aten.copy_") and len(tensors) > 1 and here != tensors[1].device.type:
            self._copied(kwargs.get("non_blocking", args[2] if len(args) > 2 else False))
            if here == CPU:
                return tensors[0].fill_(1)
        return function(*args, **kwargs)

    def _copied(self, in_background: bool) -> None:
        if not in_background:
            self.note("a copy blocks")


class NoEvent:
    """A torch.cuda.Event that has always passed."""

    waits: Waits

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def record(self, *_: Any) -> None: ...

    def query(self) -> bool:
        return True

    def elapsed_time(self, _: "NoEvent") -> float:
        return 1.0

    def synchronize(self) -> None:
        self.waits.note("a wait for the device")


class NoStream:
    """A torch.cuda.Stream in which nothing runs."""

    def __init__(self, *_: Any, **__: Any) -> None: ...

    def wait_stream(self, _: "NoStream") -> None: ...

    def wait_event(self, _: NoEvent) -> None: ...

    def record_event(self, *_: Any) -> NoEvent:
        return NoEvent()

    def synchronize(self) -> None:
        NoEvent.waits.note("a wait for the device")


@contextmanager
def no_stream(_: NoStream) -> Iterator[None]:
    yield


def pageable(make: Callable[..., Any]) -> Callable[..., Any]:
    """A maker of tensors without pinned memory, which does not exist without a GPU."""
    return lambda *args, pin_memory=False, **kwargs: make(*args, **kwargs)


def without_gpu(waits: Waits) -> None:
    """Let torch.cuda do nothing, in this process."""
    NoEvent.waits = waits
    here = NoStream()
    for name, value in {"Event": NoEvent, "Stream": NoStream, "stream": no_stream, "current_stream": lambda device=None: here,
                        "max_memory_allocated": lambda device=None: 0, "current_device": lambda: 0,
                        "get_device_properties": lambda device: SimpleNamespace(total_memory=80 << 30, major=9, minor=0)}.items():
        setattr(torch.cuda, name, value)
    for name in ("empty", "zeros"):
        setattr(torch, name, pageable(getattr(torch, name)))
    tolist = torch.Tensor.tolist

    def asked(values: torch.Tensor) -> Any:
        if values.is_meta:
            waits.note("tolist asks for values")
        return tolist(torch.zeros(values.shape, dtype=values.dtype)) if values.is_meta else tolist(values)

    torch.Tensor.tolist = asked  # type: ignore[method-assign]
    torch.Tensor.pin_memory = lambda self, *_: self  # type: ignore[method-assign]
    torch.Tensor.record_stream = lambda self, _: None  # type: ignore[method-assign]
    sgd._device_dtype_check_for_fused = optimizer._device_dtype_check_for_fused = lambda *_, **__: None  # type: ignore[attr-defined]
    KERNELS.impl("_fused_sgd_", lambda *_, **__: None, "Meta")  # which torch lacks
    KERNELS.impl("addmm.dtype_out", lambda *_, out, **__: out, "Meta", allow_override=True)  # which fails with torch 2.11


def plant(fault: str) -> None:
    """Break a step on purpose, where it has the number of labels."""
    from hpc_mp.train.parallel.collectives import RunningSum
    value = getattr(RunningSum, "whole", RunningSum.value)
    faults: dict[str, Callable[[torch.Tensor], object]] = {
        "value": lambda total: total.item(), "copy": lambda total: total.to(CPU), "tolist": lambda total: total.view(1).tolist(),
        "wait": lambda total: torch.cuda.current_stream().synchronize(), "mixed": lambda total: total + torch.ones(2)}

    def broken(self: RunningSum) -> torch.Tensor:
        total = value(self)
        faults[fault](total)
        return total

    RunningSum.whole, RunningSum.value = value, broken  # type: ignore[attr-defined, method-assign]


def step(job: Path, overrides: Sequence[str], last: bool, waits: Waits) -> dict[str, int]:
    """Train two steps and evaluate on the first rank of a job, or the last one. Return what the host waited for in the second."""
    from hpc_mp.job import load_job
    from hpc_mp.job.layout import layout_of, read_shape
    from hpc_mp.layout.models import kv_copies
    from hpc_mp.layout.schedule_of import schedule_of
    from hpc_mp.train.parallel.communicators import build, everyone
    from hpc_mp.train.parallel.dropout import Moment
    from hpc_mp.train.pipeline.stage import Microbatches
    from hpc_mp.train.rank.assemble import assemble
    from hpc_mp.train.rank.bootstrap import lay_out
    spec = load_job(job, overrides)
    shape = read_shape(spec)
    layout = layout_of(spec, shape)
    schedule, count, samples = schedule_of(layout), layout.microbatches, layout.samples
    rank = spec.ranks - 1 if last else 0
    dist.init_process_group("fake", rank=rank, world_size=spec.ranks)
    try:
        new = partial(fake_group, rank)
        with waits:
            groups = build(lay_out(spec), layout.shard_degree, META, "cpu:gloo,cuda:nccl", schedule, None, everyone(new=new),
                           kv_copies(shape, layout.degrees.tensor), new, layout.expert_cut().shards)
            engine = assemble(spec, shape, layout, groups, schedule, META)
            engine.data.filled()

            def share(number: int) -> Microbatches:
                needed = {"ids": 0, "labels": layout.stages - 1}
                documents = {"documents": torch.zeros((samples, 3), dtype=torch.int64, device=META)}
                shared = documents if spec.data.documents == "separate" else {}
                batches = {(stage, at): {name: torch.zeros((samples, layout.sequence), dtype=torch.int64, device=META)
                                         for name, where in needed.items() if where == stage} | shared
                           for stage in engine.data.stages for at in range(count)}
                moments = [Moment(number, tuple(range(at * samples, (at + 1) * samples))) for at in range(count)]
                return Microbatches(batches, moments, count * samples * layout.sequence)

            engine.step(0, share(0), lambda: (0.0, 0.0))
            waits.counts.clear()
            engine.step(1, share(1), lambda: (0.0, 0.0))
            counts = dict(waits.counts)
            engine.evaluate(share(1), lambda: (0.0,))
            return counts
    finally:
        dist.destroy_process_group()


def fake_group(rank: int, ranks: list[int], **_: Any) -> Any:
    return dist.new_group(ranks, backend="fake") if rank in ranks else None


def main() -> None:
    sys.meta_path.insert(0, MetaFinder())
    waits = Waits()
    without_gpu(waits)
    with tempfile.TemporaryDirectory() as folder:
        job = Path(folder) / "job.toml"
        for line in sys.stdin:
            case = json.loads(line)
            job.write_text(case["job"])
            if case.get("fault"):
                plant(case["fault"])
            answer: dict[str, Any] = {"waits": {}, "error": ""}
            try:
                answer["waits"] = step(job, case["overrides"], case["last"], waits)
            except Exception as error:
                answer["error"] = f"{type(error).__name__}: {error} at {traceback.format_exc().splitlines()[-4:]}"
            print(json.dumps(answer), flush=True)


if __name__ == "__main__":
    main()
