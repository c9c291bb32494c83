"""The precision tf32: all products of a step round their factors, and nothing else does. Devices without it are refused."""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from layouts import job, layout
from planting import wrapped

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.parallel.projection import Projection
from hpc_mp.train.rank.assemble import check_precision

TF32 = 'train.precision="tf32"'
ANY = 'job.device="auto"'
LAYOUTS = {"one rank": [], "split backward": layout(pipeline=2, microbatches=2, schedule="zero_bubble"),
           "tensor ranks": layout(tensor=2)}


def precision(rounds: bool) -> Callable[[Any], Any]:
    """Return a wrapper of a function that may only be called while products round their factors, or do not."""
    def wrap(function: Callable[..., Any]) -> Callable[..., Any]:
        def called(*args: Any, **more: Any) -> Any:
            assert (torch.get_float32_matmul_precision() == "high") == rounds
            return function(*args, **more)

        return called

    return wrap


def guarded() -> None:
    for name in ("product", "input_gradient", "add_weight_gradient"):
        wrapped(Projection, name, precision(True))()
    wrapped(Optimizer, "step", precision(False))()


@pytest.mark.parametrize("overrides", LAYOUTS.values(), ids=LAYOUTS)
def test_every_product_of_a_step_rounds_its_factors(place: Path, overrides: list[str]) -> None:
    run_engine(job(place, "llama", [TF32, ANY, "train.steps=1", *overrides]), before=guarded)


def test_products_of_fp32_do_not(place: Path) -> None:
    """Negative control."""
    with pytest.raises(RuntimeError, match="AssertionError"):
        run_engine(job(place, "llama", ['train.precision="fp32"', "train.steps=1"]), before=guarded)


def test_a_cpu_and_an_old_gpu_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HpcMpError, match="needs GPUs"):
        job(tmp_path, "llama", [TF32, 'job.device="cpu"'])
    with pytest.raises(HpcMpError, match="a CPU"):
        check_precision("tf32", torch.device("cpu"))
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda device: "Tesla V100-SXM2-32GB")
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (7, 0))
    with pytest.raises(HpcMpError, match="V100"):
        check_precision("tf32", torch.device("cuda", 0))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (8, 0))
    check_precision("tf32", torch.device("cuda", 0))
    check_precision("fp32", torch.device("cpu"))
