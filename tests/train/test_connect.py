"""Pipelines under NCCL's rule that two ranks wait for each other at their first message (no GPU is needed to show it)."""

from __future__ import annotations

from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from engines import run_engine
from exact import PLAIN, SEVERAL
from layouts import job, layout, write_text

from hpc_mp.train.engine import groups


def connect_as_nccl(seconds: float = 90.0) -> None:
    """A rank's first message to or from another in a group blocks until the other's first message there, or for so long."""
    store_of = dist.distributed_c10d._get_default_store
    connected = set()

    def blocking(function: Callable[..., Any]) -> Callable[..., Any]:
        def call(tensor: object, other: int, group: Any = None) -> Any:
            pair = f"{group.group_name} {min(other, dist.get_rank())} {max(other, dist.get_rank())}"
            if pair not in connected:
                connected.add(pair)
                store_of().set(f"{pair} {dist.get_rank()}", "")
                store_of().wait([f"{pair} {other}"], timedelta(seconds=seconds))
            return function(tensor, other, group=group)

        return call

    for name in ("send", "recv", "isend", "irecv"):
        setattr(dist, name, blocking(getattr(dist, name)))


def connect_in_the_first_step() -> None:
    connect_as_nccl(10.0)
    groups._say_hello = lambda channels, here, device: None


SETTINGS = ['train.precision="fp32"', "train.steps=1"]


@pytest.mark.parametrize(("pipeline", "schedule", "microbatches"), [
    *((4, name, 2) for name in PLAIN), *((2, name, 2) for name in SEVERAL),
    *(pytest.param(*case, marks=pytest.mark.prove) for case in ((3, "gpipe", 1), (2, "1f1b", 4)))])
def test_first_messages_never_wait_for_each_other(tmp_path: Path, pipeline: int, schedule: str, microbatches: int) -> None:
    write_text(tmp_path)
    stages = {"virtual_stages": 2} if schedule in SEVERAL else {}
    cut = layout(pipeline=pipeline, schedule=schedule, microbatches=microbatches, **stages)
    run_engine(job(tmp_path, "gpt2", [*SETTINGS, *cut]), before=connect_as_nccl)


def test_connecting_in_the_first_step_would_hang(tmp_path: Path) -> None:
    """Negative control: the last stage sends a gradient only after the forward before which it is awaited."""
    write_text(tmp_path)
    spec = job(tmp_path, "gpt2", [*SETTINGS, *layout(pipeline=2, schedule="gpipe", microbatches=2)])
    with pytest.raises(RuntimeError, match="rank"):
        run_engine(spec, before=connect_in_the_first_step)
