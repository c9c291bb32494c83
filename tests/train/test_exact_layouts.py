"""Every layout equals one process of plain transformers and torch.optim, in fp64 to 1e-12: in training and in evaluations, by the
engine alone and as a whole run; and so does every order of ranks, option of a model, and optimizer."""

from __future__ import annotations

from itertools import permutations
from pathlib import Path

import pytest
from exact import (
    COVER,
    EXACT,
    GPT2,
    HELD_OUT,
    LAYOUTS,
    LLAMA,
    MIXTRAL,
    OPTIMIZERS,
    TIED,
    UNTIED,
    Engine,
    Reference,
    check_evaluations,
    pairs,
)
from layouts import VARIANTS, job, layout, run_whole

# Each axis once with a rendezvous, a run directory and a checkpoint; a tied weight at two ends among them.
WHOLE = {
    "tp4": LLAMA, "pp2 gpipe M3": GPT2, "pp4 zero_bubble M6": TIED, "dp4 zero1": GPT2, "dp2 zero2": GPT2, "cp2 ring": GPT2,
    "pp2 dp2 zero3 zero_bubble_v": TIED, "tp2 pp2 dp2 zero2 interleaved_1f1b": GPT2, "sp2 pp2 zero_bubble": GPT2,
    "dp2 cp2 zero1 shard2": TIED, "ep2 dp4 zero3 shard2": MIXTRAL,
}
COVERED = [(model, name) for name, models in COVER.items() for model in models if WHOLE.get(name) != model]


@pytest.mark.parametrize(("model", "name"), COVERED)
def test_a_layout_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name]).distance(reference(model)) < EXACT


@pairs(LAYOUTS, quick={})
def test_a_layout_evaluates_as_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    """The third step comes after an evaluation, which training does not notice."""
    result = engine(model, *HELD_OUT, *LAYOUTS[name])
    expected = reference(model, *HELD_OUT)
    assert result.distance(expected) < EXACT and [step for step, _, _ in result.evaluations] == [2, 3]
    check_evaluations(result, expected)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_equals_one_process(place: Path, reference: Reference, name: str) -> None:
    result, expected = run_whole(job(place, WHOLE[name], [*HELD_OUT, *LAYOUTS[name]])), reference(WHOLE[name], *HELD_OUT)
    assert result.distance(expected) < EXACT
    check_evaluations(result, expected)


@pairs(["pp2 1f1b M3", "tp2 pp2 dp2 zero2"], [UNTIED], {"pp2 1f1b M3": (UNTIED,)})
def test_untied_gpt2_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name]).distance(reference(model)) < EXACT


ORDERS = ["".join(letters) for letters in permutations("DPT")]


# Pipeline varies fastest here; tensor does in DPT, the order of the layouts above, and data in PTD, among the proofs.
@pairs(ORDERS, (GPT2, LLAMA), {"TDP": (GPT2,)})
def test_every_letter_order_is_exact(engine: Engine, reference: Reference, model: str, name: str) -> None:
    overrides = [*layout(2, 2, 2, microbatches=3), f'parallel.order="{name}"']
    assert engine(model, *overrides).distance(reference(model)) < EXACT


SGD = {"tp2": (GPT2,), "pp2 1f1b M3": (LLAMA,), "dp2 zero0": (), "dp2 zero1": (LLAMA,), "dp2 zero3": (GPT2,),
       "tp2 pp2 dp2 zero1": ()}


@pairs(SGD, (GPT2, LLAMA), SGD)
def test_sgd_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *OPTIMIZERS["sgd"], *LAYOUTS[name]).distance(reference(model, *OPTIMIZERS["sgd"])) < EXACT


QUICK = {"llama with biases", "llama with a padding row", "gptj, tied", "gpt2 scaled by layer"}
assert VARIANTS.keys() >= QUICK


@pairs(["tp2", "tp2 pp2 M3", "tp2 pp2 dp2 zero1"], VARIANTS, {"tp2": tuple(QUICK)})
def test_variants_of_a_family_are_exact(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name]).distance(reference(model)) < EXACT
