"""Dropout is the same on every layout; bf16 computes over fp32 masters."""

from __future__ import annotations

from exact import EXACT, GPT2, LAYOUTS, LLAMA, TIED, WRONG, Engine, pairs
from safetensors import safe_open

from hpc_mp.rundir import newest_complete

DROPOUT = {"tp2": (GPT2, LLAMA), "tp4": (LLAMA,), "pp4 1f1b M6": (GPT2,), "dp4 zero2": (LLAMA,), "tp2 pp2 dp2 zero3": (GPT2,)}


@pairs(DROPOUT, (GPT2, LLAMA), DROPOUT)
def test_dropout_is_equal_on_every_layout(engine: Engine, model: str, name: str) -> None:
    one, _ = engine(model, "train.dropout=0.2")
    assert one.distance(engine(model)[0]) > WRONG, "dropout must change something"
    assert engine(model, "train.dropout=0.2", *LAYOUTS[name])[0].distance(one) < EXACT


BF16 = {"tp2": (GPT2,), "pp2 1f1b M3": (TIED,), "dp2 zero0": (TIED,), "dp2 zero3": (GPT2,), "tp2 pp2 dp2 zero1": (TIED,)}


@pairs(BF16, (GPT2, TIED), BF16)
def test_bf16_computes_in_bf16_over_fp32_masters(engine: Engine, model: str, name: str) -> None:
    whole, _ = engine(model, 'train.precision="fp32"')
    result, run = engine(model, 'train.precision="bf16"', *LAYOUTS[name])
    assert 1e-5 < result.distance(whole) < 3e-2, "bf16 keeps 8 bits: near fp32, and not equal"
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None
    for path in newest.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F32"}  # noqa: SIM118
