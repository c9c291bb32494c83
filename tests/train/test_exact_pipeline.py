"""Pipelines of any schedule and cut equal one process of plain transformers and torch.optim, in fp64 to 1e-12."""

from __future__ import annotations

from exact import ENDS, EXACT, LAYOUTS, PIPELINE, UNTIED, Engine, Reference, pairs


@pairs(PIPELINE)
def test_a_pipeline_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT


@pairs(ENDS)
def test_stages_without_layers_equal_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT


@pairs(["pp2 1f1b M3", "tp2 pp2 dp2 zero2"], [UNTIED], {"pp2 1f1b M3": (UNTIED,)})
def test_untied_gpt2_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name])[0].distance(reference(model)) < EXACT
