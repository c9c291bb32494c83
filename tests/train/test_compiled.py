"""Compiled blocks train alike, and equal layers share their graphs: of every family, and of layers that somebody has written.

Graphs are those of dynamo, which ``aot_eager`` runs without a compiler. A frame is a Python function, or the rest of one, that
dynamo has tried to make a graph of.
"""

import re
from collections.abc import Callable, Mapping
from functools import partial
from itertools import product
from pathlib import Path
from typing import Any

import lists
import masked
import modules
import pytest
import torch
from exact import EXACT, Engine
from layouts import FAMILIES, MODELS, job, layout, start
from lists import lay
from masked import Training
from planting import before_steps, planted, wrapped
from ranks import run_ranks, train
from torch import Tensor, nn

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.layout import Layout
from hpc_mp.rundir import read_lines
from hpc_mp.train.model import build_stage
from hpc_mp.train.model.listed_stage import ListedStage
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.rank.assemble import check_compiler
from hpc_mp.train.step.engine import Engine as Steps

LAYOUTS = {
    "microbatches": layout(microbatches=2), "tp2": layout(2, microbatches=2),
    "recompute": layout(microbatches=2, recompute='"full"'),
    "sequence": layout(2, sequence="true"), "ulysses": layout(context=2, context_method='"ulysses"'),
    "ring": layout(context=2, context_method='"ring"')}
CASES = [*product([*MODELS, *FAMILIES], ("tp2", "recompute")), *product(("gpt2", "llama", "mixtral"), ("microbatches",)),
         *product(("llama", "gemma2", "qwen3_moe"), ("sequence",)), *product(("llama",), ("ulysses", "ring"))]
KINDS = {"gemma2": 2, "qwen3_moe": 2}  # layers with and without a window, or experts; 1 in other models


def aot_eager() -> None:
    wrapped(torch, "compile", lambda compile_: partial(compile_, backend="aot_eager"))()


def stats() -> tuple[int, int]:
    """Return the numbers of graphs and frames."""
    from torch._dynamo.utils import counters

    return counters["stats"]["unique_graphs"], counters["frames"]["total"]


def frames_by_layer(stages: type = TransformersStage, call: str = "block") -> dict[Any, int]:
    """Return the numbers of frames that are made in a layer's computations, as far as this rank has run.

    Args:
        call: the method of stages that computes a layer; its first argument names the layer.
    """
    frames: dict[Any, int] = {}

    @planted(stages, call)
    def counted(compute: Callable[..., Any], stage: Any, layer: Any, *rest: Any) -> Any:
        before = stats()[1]
        result = compute(stage, layer, *rest)
        frames[layer] = frames.get(layer, 0) + stats()[1] - before
        return result

    counted()
    return frames


def scaled_apart() -> None:
    """The negative control: a number of a module that differs between layers by nothing that shows in a loss."""
    @planted(build_stage, "_compilation")
    def scaled(compilation: Callable[..., None], stage: TransformersStage, *rest: Any) -> None:
        for number, block in enumerate(stage.blocks):
            stage.get_submodule(f"{block}.{stage.family.attention}").scaling *= 1 + number * 1e-9
        compilation(stage, *rest)

    scaled()


def check_alike(place: Path, engine: Engine, model: str, name: str, before: Callable[[], None] = aot_eager) -> None:
    """Compare losses and norms of a compiled training with those of an uncompiled one, and count frames by layer."""
    overrides = ['train.precision="fp32"', *LAYOUTS[name]]
    eager = engine(model, *overrides)
    spec = job(place, model, [*overrides, "train.compile=true"])
    run = start(spec)

    def rank() -> tuple[int, list[int], dict[str, int]]:
        before()
        graphs, frames = list[int](), frames_by_layer()  # graphs: before each step, and at the end
        before_steps(lambda step: graphs.append(stats()[0]))()
        return train(run.job), [*graphs, stats()[0]], frames

    results = run_ranks(spec.ranks, rank, timeout=250.0)
    assert all(code == 0 and 3 <= graphs[-1] <= 20 for code, graphs, _ in results), (results, run.main_log.read_text())
    assert all(graphs[2] == graphs[-1] and len(graphs) == 4 for _, graphs, _ in results), "none is made after the second step"
    assert all(len(frames) == 5 and sum(map(bool, frames.values())) == KINDS.get(model, 1) for *_, frames in results), (
        f"layers share graphs, but these had frames of their own: {results}")
    lines = read_lines(run.metrics)
    assert max(abs(line["loss"] - loss) for line, loss in zip(lines, eager.losses, strict=True)) < 1e-5
    assert max(abs(line["grad_norm"] / norm - 1) for line, norm in zip(lines, eager.norms, strict=True)) < 1e-4


@pytest.mark.prove
@pytest.mark.parametrize(("model", "name"), CASES)
def test_compiled_blocks_train_alike(place: Path, engine: Engine, model: str, name: str) -> None:
    check_alike(place, engine, model, name)


@pytest.mark.prove
def test_graphs_of_each_layer_are_seen(place: Path, engine: Engine) -> None:
    def before() -> None:
        aot_eager()
        scaled_apart()

    with pytest.raises(AssertionError, match="had frames of their own"):
        check_alike(place, engine, "llama", "microbatches", before)


def compiled() -> None:
    """Have an engine of ``lists`` compile."""
    aot_eager()
    wrapped(lists, "EngineSettings", lambda settings: partial(settings, compile=True))()


def settled() -> None:
    """Compile, and fail if frames are made after the second step, or not in one layer of a family's equal ones."""
    compiled()
    frames, layers = list[int](), frames_by_layer()

    @planted(Steps, "step")
    def counted(step: Callable[..., Any], engine: Steps, *rest: Any) -> Any:
        result = step(engine, *rest)
        frames.append(stats()[1])
        assert frames[0] > 0 and frames[-1] == frames[min(1, len(frames) - 1)], frames
        assert sum(map(bool, layers.values())) == min(1, len(layers)), layers
        return result

    counted()


MASKED: Mapping[str, tuple[Training, Layout]] = {
    "microbatches": (Training(), lay(layers=(5,))),
    "tp2": (Training(), lay(2, layers=(5,))),
    "recompute": (Training(), lay(2, layers=(5,), recompute="full")),
    "sequence": (Training({"hidden_dropout_prob": 0.2, "attention_probs_dropout_prob": 0.3}),
                 lay(2, sequence_parallel=True, layers=(5,))),
    "no padding": (Training(without=frozenset(("token_types", "documents"))), lay(2, layers=(5,))),
}


@pytest.mark.prove
@pytest.mark.parametrize("name", MASKED)
def test_compiled_models_of_masked_tokens_equal_one_process(name: str) -> None:
    training, layout = MASKED[name]
    assert masked.distance(layout, training, before=settled) < EXACT


LISTED = {"tp2": lay(2), "pp2 recompute": lay(pipeline=2, layers=(3, 4), recompute="full")}


@pytest.mark.prove
@pytest.mark.parametrize("name", LISTED)
def test_a_compiled_list_of_layers_equals_plain_torch(name: str) -> None:
    assert lists.distance(LISTED[name], before=settled) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize("make", [modules.written, modules.row])
def test_a_compiled_module_equals_itself(make: Callable[[], Any]) -> None:
    assert modules.off(make, lay(2, layers=(6,) if make is modules.written else (7,)), settled) < EXACT


class Part(nn.Module):
    """One of several equal parts of a model. ``apart``: the negative control, a number that only this one has."""

    def __init__(self, apart: float) -> None:
        super().__init__()
        self.up, self.down, self.apart = nn.Linear(8, 12), nn.Linear(12, 8), apart

    def forward(self, hidden: Tensor) -> Tensor:
        return hidden + self.down(torch.tanh(self.up(hidden) * self.apart))


def own_loop(apart: float) -> tuple[list[list[float]], list[bool]]:
    """Return the losses of a loop, compiled and not, and whether frames are made in each of a model's equal parts."""
    aot_eager()
    frames, losses = frames_by_layer(ListedStage, "_group"), []
    batch = {"input": torch.randn(4, 8, generator=torch.Generator().manual_seed(1))}
    for compile_ in (False, True):
        torch.manual_seed(0)
        parts = [Part(1 + number * apart) for number in range(4)]
        model = nn.Sequential(nn.Linear(8, 8), *parts)  # all parts pass gradients on to what is before them
        run = hpc_mp.parallel(model, loss_fn=lambda outputs, batch: (outputs.square().sum(), len(outputs)), compile=compile_,
                              microbatches=2, optimizer={"name": "sgd", "lr": 0.01})
        losses.append([float(run.step(batch)) for _ in range(3)])
    return losses, [made > 0 for made in frames.values()][1:]


def test_equal_layers_of_a_list_share_graphs() -> None:
    (eager, compiled), made = run_ranks(1, own_loop, 0.0)[0]
    assert made == [True, False, False, False] and eager[0] > eager[-1] + 1e-3
    assert eager == pytest.approx(compiled, rel=1e-6)


@pytest.mark.prove
def test_layers_of_a_list_that_differ_share_no_graphs() -> None:
    assert run_ranks(1, own_loop, 1e-9)[0][1] == [True] * 4


@pytest.mark.parametrize(("device", "program"), [("cuda", "gcc"), ("cpu", "g++")])
def test_a_node_without_a_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, program: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(HpcMpError, match=rf"train\.compile = true: needs one of {re.escape(program)}, .* has none"):
        check_compiler(torch.device(device))
    (tmp_path / program).touch(mode=0o755)
    check_compiler(torch.device(device))


def test_double_precision_is_not_compiled(place: Path) -> None:
    with pytest.raises(HpcMpError, match=r"train\.compile = true: is not supported with train\.precision"):
        job(place, "llama", ["train.compile=true"])
