"""The engine on a GPU beside the engine and plain transformers on the CPU."""

import traceback
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from engines import run_engine
from exact import EXACT
from layouts import MODELS, Result, job, layout, relaunch, trained_run
from plain import run_plain

from hpc_mp.train.model.attention_table import FUNCTIONS, FUSED
from hpc_mp.train.parallel import flash
from hpc_mp.train.parallel.masks import Visible, begins_of, first_seen, offsets_of
from hpc_mp.train.step import engine as engine_module

pytestmark = pytest.mark.gpu

ON_GPU, ON_CPU = 'job.device="cuda"', 'job.device="cpu"'
AWAY = [*layout(microbatches=3, schedule="interleaved_1f1b", virtual_stages=3), "parallel.offload_horizon=0"]
SAVERS = {
    "alone": [],
    "microbatches": layout(microbatches=3),
    "recompute": ['parallel.recompute="full"'],
    "selective": ['parallel.recompute="selective"'],
    "activations away": ['parallel.offload=["activations"]', *AWAY],
    "optimizer away": ['parallel.offload=["optimizer"]'],
    "parameters away": ['parallel.offload=["optimizer","parameters"]', "parallel.zero=3"],
    "all away": ['parallel.offload=["optimizer","parameters","activations"]', "parallel.zero=3", *AWAY],
}


def forbid_waiting() -> None:
    """From the second step on ``Engine.step`` may wait for the GPU nowhere, but in a step that records its actions."""
    step = engine_module.Engine.step

    def strict(self: engine_module.Engine, number: int, *given: Any, **more: Any) -> engine_module.StepResult:
        traced = more.get("trace", False) or True in given
        torch.cuda.set_sync_debug_mode("default" if number == 0 or traced else "error")
        try:
            return step(self, number, *given, **more)
        except RuntimeError:
            traceback.print_exc()
            raise
        finally:
            torch.cuda.set_sync_debug_mode("default")

    engine_module.Engine.step = strict  # type: ignore[method-assign]


@pytest.mark.parametrize("precision", ["fp32", "bf16"])
@pytest.mark.parametrize("saver", SAVERS)
@pytest.mark.parametrize("model", ["llama", "gpt2", "gptj"])
def test_the_host_waits_for_nothing_in_a_step(place: Path, model: str, saver: str, precision: str) -> None:
    run_engine(job(place, model, [ON_GPU, f'train.precision="{precision}"', *SAVERS[saver]]), before=forbid_waiting)


@pytest.mark.parametrize("model", ["llama", "gpt2"])
def test_nor_with_dropout(place: Path, model: str) -> None:
    run_engine(job(place, model, [ON_GPU, 'train.precision="bf16"', "train.dropout=0.1"]), before=forbid_waiting)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("window", [None, 50])
def test_the_kernel_for_documents_computes_what_blocks_of_queries_do(dtype: torch.dtype, window: int | None,
                                                                     monkeypatch: pytest.MonkeyPatch) -> None:
    length, heads, module = 200, (8, 2, 2), SimpleNamespace(num_key_value_groups=4, is_causal=True)
    documents, positions = torch.tensor([[0, 1, 70, 200], [0, 64, 128, 199]], device="cuda"), torch.arange(length, device="cuda")
    first = first_seen(begins_of(documents, positions), window, positions)
    assert first is not None
    visible = Visible(first, offsets_of(documents, 2, length, documents.device), window, True)
    tensors = [torch.randn(2, count, length, 64, device="cuda", dtype=dtype, requires_grad=True) for count in heads]
    assert flash.computes_documents(tensors[0])

    def attend() -> list[torch.Tensor]:
        output, _ = FUNCTIONS[FUSED](module, *tensors, visible, scaling=0.125)
        return [output, *torch.autograd.grad(output.float().square().sum(), tensors)]

    kernel = attend()
    monkeypatch.setattr(flash, "computes_documents", lambda query: False)
    for one, other in zip(kernel, attend(), strict=True):
        torch.testing.assert_close(one, other, rtol=2e-2, atol=2e-2)


def reference(place: Path, model: str) -> Result:
    return run_plain(job(place, model, [ON_CPU]))


@pytest.mark.parametrize("model", MODELS)
def test_single_precision_is_near_double_precision(place: Path, model: str) -> None:
    plain = reference(place, model)
    found = run_engine(job(place, model, [ON_GPU, 'train.precision="fp32"']))
    assert found.distance(plain) < 1e-4


@pytest.mark.parametrize("precision", ["bf16", "fp16"])
@pytest.mark.parametrize("model", MODELS)
def test_half_precision_follows(place: Path, model: str, precision: str) -> None:
    plain = reference(place, model)
    found = run_engine(job(place, model, [ON_GPU, f'train.precision="{precision}"']))
    assert max(abs(one - other) for one, other in zip(found.losses, plain.losses, strict=True)) < 3e-2


@pytest.mark.parametrize(("first", "then"), [(ON_CPU, ON_GPU), (ON_GPU, ON_CPU)])
@pytest.mark.parametrize("degrees", [layout(), layout(2, data=2, zero=3)], ids=["one rank", "tp2 dp2 zero3"])
def test_a_run_goes_on_on_the_other_device(place: Path, first: str, then: str, degrees: list[str]) -> None:
    whole = run_engine(job(place, "llama", [ON_CPU, "train.steps=6"]))
    spec = job(place, "llama", [first, "train.steps=3"])
    run = trained_run(spec)
    found = relaunch(run, place, "llama", [then, "train.steps=6", *degrees])
    assert found.distance(whole) < EXACT
