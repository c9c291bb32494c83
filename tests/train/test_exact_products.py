"""Tensor, pipeline and data parallelism together equal one process, in fp64 to 1e-12, whatever the order of the ranks."""

from __future__ import annotations

from itertools import permutations

from exact import EXACT, GPT2, LAYOUTS, LLAMA, PRODUCTS, Engine, Reference, pairs
from layouts import layout


@pairs(PRODUCTS)
def test_a_product_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT


ORDERS = ["".join(letters) for letters in permutations("DPT")]
# Pipeline varies fastest here; tensor does in DPT, the order of the products above, and data in PTD, among the proofs.
QUICK = {"TDP": (GPT2,)}


@pairs(ORDERS, (GPT2, LLAMA), QUICK)
def test_every_letter_order_is_exact(engine: Engine, reference: Reference, model: str, name: str) -> None:
    overrides = [*layout(2, 2, 2, microbatches=3), f'parallel.order="{name}"']
    assert engine(model, *overrides)[0].distance(reference(model)) < EXACT
