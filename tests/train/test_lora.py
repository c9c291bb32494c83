"""Adapters equal PEFT's in one process on every axis, in fp64 to 1e-12."""

import pytest
from exact import EXACT, LAYOUTS, Engine, Reference, cases, layout

LORA = ["lora.rank=3", "lora.alpha=12.0"]


@pytest.mark.parametrize("model", ["llama", "gpt2", "mixtral"])
def test_one(engine: Engine, reference: Reference, model: str) -> None:
    reference(model, *LORA)
