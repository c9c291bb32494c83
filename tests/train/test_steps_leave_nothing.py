"""What a step allocates is free again when it is over: nothing that autograd keeps outlives it. A rank notes what it holds."""

import ctypes
import gc
import json
import os
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import psutil
import pytest
from engines import run_engine
from exact import cases
from layouts import job, layout, write_text
from planting import planted
from torch import Tensor

from hpc_mp.train.parallel import gradients
from hpc_mp.train.step.engine import Engine
from hpc_mp.train.step.memory import resident_noted

STEPS, SETTLED, SEEN = 14, 4, 4  # steps in all, after how many of them a rank has all that it keeps, and how many are looked at
MOST = 96 << 10  # bytes by which the heap may differ then, a step's losses and messages among them

LAYOUTS = {
    "1f1b": layout(pipeline=2),
    "tp2": layout(tensor=2),
    "zero_bubble": [*layout(pipeline=2), 'parallel.schedule="zero_bubble"'],
    "tp2 zero_bubble": [*layout(tensor=2, pipeline=2), 'parallel.schedule="zero_bubble"'],
    "zero_bubble_v": [*layout(pipeline=2), 'parallel.schedule="zero_bubble_v"'],
    "dp2 zero2": [*layout(data=2), "parallel.zero=2"],
    "dp2 zero3 full": [*layout(data=2), "parallel.zero=3", 'parallel.recompute="full"'],
}


class _Heap(ctypes.Structure):
    """glibc's ``struct mallinfo2``, see mallinfo(3)."""

    _fields_ = [(name, ctypes.c_size_t) for name in (
        "arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")]


def _allocated() -> int:
    """Bytes that malloc has given to this process and not got back."""
    mallinfo2 = ctypes.CDLL(None).mallinfo2
    mallinfo2.restype = _Heap
    heap = mallinfo2()
    return int(heap.uordblks + heap.hblkhd)


def _growth(directory: Path, overrides: Sequence[str], forget: bool = False) -> list[int]:
    """Of each rank, from the most of some early steps to the least of the last ones: gloo's threads let go of messages late.
    ``forget``: the products of weight gradients are never let go of."""
    write_text(directory)
    spec = job(directory, "llama", [*overrides, f"train.steps={STEPS}"])

    seen: list[int] = []

    @planted(Engine, "step")
    def noted(step: Any, *args: Any, **named: Any) -> Any:
        gc.collect()  # of cycles, which Python frees when it comes to it
        seen.append(_allocated())
        (directory / f"heap-{os.environ['SLURM_PROCID']}").write_text(json.dumps(seen))
        return step(*args, **named)

    kept: list[Tensor] = []

    @planted(gradients.Sink, "add_product")
    def keeping(add: Any, sink: gradients.Sink, left: Tensor, right: Tensor, more: bool = False) -> None:
        kept.append(left @ right)
        add(sink, left, right, more)

    def before() -> None:
        os.environ["TORCH_FR_BUFFER_SIZE"] = "0"  # torch's flight recorder keeps the last 2,000 messages, and grows until then
        noted()
        if forget:
            keeping()

    run_engine(spec, before)
    heaps = [json.loads(file.read_text()) for file in directory.glob("heap-*")]
    assert len(heaps) == spec.ranks
    return [min(heap[-SEEN:]) - max(heap[SETTLED:SETTLED + SEEN]) for heap in heaps]


@pytest.mark.parametrize("name", cases(LAYOUTS, ("1f1b", "tp2 zero_bubble")))
def test_the_heap_does_not_grow_with_steps(tmp_path: Path, name: str) -> None:
    assert max(_growth(tmp_path, LAYOUTS[name])) < MOST


def test_what_steps_keep_is_seen(tmp_path: Path) -> None:
    assert max(_growth(tmp_path, LAYOUTS["zero_bubble"], forget=True)) > 2 * MOST


def noted(file: Path) -> int:
    return int(file.read_text())


def settled(file: Path, expected: float) -> bool:
    """Whether the note comes to within a tenth of ``expected`` bytes in a minute; every reading on the way is a number."""
    deadline = time.monotonic() + 60
    while time.monotonic() < deadline:
        if file.exists() and abs(noted(file) - expected) < expected / 10:
            return True
        time.sleep(0.05)
    return False


def test_the_note_follows_what_the_process_holds(tmp_path: Path) -> None:
    file = tmp_path / "memory-00000"
    own = psutil.Process().memory_info
    with resident_noted(file):
        assert settled(file, own().rss)
        before = own().rss
        held = bytearray(b"1" * before)
        assert own().rss > 1.5 * before and settled(file, own().rss)
        del held
        assert settled(file, before)
    last = file.stat().st_mtime_ns
    held = bytearray(b"1" * before)
    time.sleep(0.7)
    assert file.stat().st_mtime_ns == last and len(held) == before


def test_a_directory_that_cannot_be_written_is_no_failure(tmp_path: Path) -> None:
    with resident_noted(tmp_path / "absent" / "memory-00000"):
        time.sleep(0.1)
