"""Families of one file each equal one process of plain transformers on every axis, in fp64 to 1e-12."""

from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from engines import run_engine
from exact import EXACT, LAYOUTS, ONE_STEP, WRONG, Engine, Plain, Reference, cases
from layouts import FAMILIES, job, layout
from planting import planted, wrapped
from torch import Tensor

from hpc_mp.layout import models
from hpc_mp.train.model import build_stage
from hpc_mp.train.parallel import groups
from hpc_mp.train.parallel.projection import Projection

AXES = {
    "tp2": LAYOUTS["tp2"],
    "tp3": LAYOUTS["tp3"],
    "tp8": layout(8),  # more ranks than key-value heads
    "pp2": LAYOUTS["pp2 1f1b M3"],
    "pp2 layers 1+4": LAYOUTS["pp2 layers 1+4"],
    "pp2 zero_bubble_v": LAYOUTS["pp2 zero_bubble_v M4"],
    "zero3": LAYOUTS["dp2 zero3"],
    "sequence": layout(2, sequence="true"),
    "tp2 pp2 dp2": LAYOUTS["tp2 pp2 dp2 zero2"],
    "recompute full": [*layout(2, 2), 'parallel.recompute="full"'],
    "recompute every-2": [*layout(1, 2), 'parallel.recompute="every-2"'],
    "selective": [*layout(2), 'parallel.recompute="selective"'],
    "attention whole": layout(2, sequence="true", tensor_modules='["*mlp*"]'),
    "cp2 ring": LAYOUTS["cp2 ring"],
    "cp4 ulysses": layout(context=4, context_method='"ulysses"'),
}
QUICK = {("gpt_neox", "tp2"), ("qwen3_moe", "tp3"), ("gpt_neox one after the other", "pp2"), ("gemma2", "sequence"),
         ("gemma2", "recompute full"), ("qwen3_moe", "tp2 pp2 dp2"), ("gemma2", "cp2 ring")}


@pytest.mark.parametrize(("model", "name"), cases([(model, name) for model in FAMILIES for name in AXES], QUICK))
def test_a_family_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *AXES[name]).distance(reference(model)) < EXACT


@pytest.mark.prove
def test_the_bias_of_a_tied_head_is_cut_with_the_embedding(engine: Engine, reference: Reference) -> None:
    alone = engine("gptj, tied", *layout(2, tensor_modules='["transformer.wte"]'))
    assert alone.distance(reference("gptj, tied")) < EXACT


EXPERTS = {"ep2": layout(data=2, expert=2), "ep2 dp4 zero3": layout(data=4, expert=2, zero=3)}


@pytest.mark.parametrize("name", cases(EXPERTS, {"ep2"}))
def test_experts_in_some_layers_are_shared_out(engine: Engine, reference: Reference, name: str) -> None:
    assert engine("qwen3_moe", *EXPERTS[name]).distance(reference("qwen3_moe")) < EXACT


unscaled_embedding = wrapped(build_stage, "embedding_scale", lambda right: lambda embedding: (1.0, False))
unsummed_norm_of_heads = wrapped(groups.Groups, "sharing", lambda sharing: lambda self, slot: (
    groups.Axis() if slot.weight.name.endswith(("q_norm.weight", "k_norm.weight")) else sharing(self, slot)))


@planted(Projection, "product")
def parts_side_by_side(product: Callable[..., Tensor], projection: Projection, x: Tensor) -> Tensor:
    """q, k and v of all heads are taken to lie one behind the other, as in GPT-2."""
    y = product(projection, x)
    if not projection.names[0].endswith("query_key_value.weight"):
        return y
    return y.unflatten(-1, (3, -1, 8)).transpose(-3, -2).flatten(-3)


def nothing() -> None:
    """Only the configuration is another one."""


SLIDING = str(["sliding_attention"] * 5).replace("'", '"')
# A model, the layout, what is forgotten: keys of the configuration, or a fault of the ranks.
CONTROLS: dict[str, tuple[str, str, Sequence[str], Callable[[], None]]] = {
    "scores have no cap": ("gemma2", "tp2", ["attn_logit_softcapping=1e9"], nothing),
    "logits have no cap": ("gemma2", "pp2", ["final_logit_softcapping=1e9"], nothing),
    "all layers have the window": ("gemma2", "pp2", [f"layer_types={SLIDING}"], nothing),
    "no layer has a window": ("gemma2", "sequence", ["sliding_window=24"], nothing),
    "no layer has a window, in a ring": ("gemma2", "cp2 ring", ["sliding_window=24"], nothing),
    "the embedding is not scaled": ("gemma2", "tp2", [], unscaled_embedding),
    "norms of heads are not summed": ("qwen3_moe", "tp2", [], unsummed_norm_of_heads),
    "weights of choices do not add up to 1": ("qwen3_moe", "zero3", ["norm_topk_prob=false"], nothing),
    "attention and MLP one after the other": ("gpt_neox", "tp2", ["use_parallel_residual=false"], nothing),
    "q, k and v side by side": ("gpt_neox", "tp2", [], parts_side_by_side),
    "attention and MLP side by side": ("gpt_neox one after the other", "pp2", ["use_parallel_residual=true"], nothing),
}
QUICK_CONTROLS = {"the embedding is not scaled", "norms of heads are not summed", "q, k and v side by side"}


@pytest.mark.parametrize("control", cases(CONTROLS, QUICK_CONTROLS))
def test_what_a_family_needs_is_missed(place: Path, plain: Plain, control: str) -> None:
    model, name, keys, sabotage = CONTROLS[control]
    wrong = job(place, model, [*AXES[name], ONE_STEP, *(f"model.config.{key}" for key in keys)])
    assert run_engine(wrong, before=sabotage).distance(plain(job(place, model, [ONE_STEP]))) > WRONG


def test_a_dense_layer_taken_for_experts_is_refused(place: Path) -> None:
    def experts_everywhere() -> None:
        right = models.FAMILIES["qwen3_moe"]
        models.FAMILIES["qwen3_moe"] = replace(right, read=lambda config: replace(right.read(config), dense=()))

    with pytest.raises(RuntimeError, match="the table of qwen3_moe does not match transformers"):
        run_engine(job(place, "qwen3_moe", [ONE_STEP]), before=experts_everywhere)
