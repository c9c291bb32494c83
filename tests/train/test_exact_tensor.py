"""Layouts cut across their layers equal one process of plain transformers and torch.optim, in fp64 to 1e-12."""

from __future__ import annotations

import pytest
from exact import EXACT, LAYOUTS, TENSOR, Engine, Reference, pairs
from layouts import VARIANTS, layout


@pairs(TENSOR)
def test_a_tensor_layout_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT


QUICK = {"llama with biases", "llama with a padding row", "gptj, tied", "gpt2 scaled by layer"}
assert VARIANTS.keys() >= QUICK


@pytest.mark.parametrize("overrides", [
    pytest.param(layout(2), id="tp2"),
    pytest.param(layout(2, 2, microbatches=3), id="tp2 pp2", marks=pytest.mark.prove),
    pytest.param(LAYOUTS["tp2 pp2 dp2 zero1"], id="tp2 pp2 dp2 zero1", marks=pytest.mark.prove)])
@pytest.mark.parametrize("model", [pytest.param(name, marks=() if name in QUICK else pytest.mark.prove) for name in VARIANTS])
def test_variants_of_a_family_are_exact(engine: Engine, reference: Reference, model: str, overrides: list[str]) -> None:
    assert engine(model, *overrides)[0].distance(reference(model)) < EXACT
