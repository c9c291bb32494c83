"""Dropout is the same on every layout; 16 bits compute over fp32 masters; rounding does not grow over hundreds of steps."""

from pathlib import Path

import pytest
from exact import EXACT, GPT2, GPTJ, LAYOUTS, LLAMA, MIXTRAL, TIED, WRONG, Engine, Launched, Plain, Reference, cases, pairs
from layouts import job
from safetensors import safe_open

from hpc_mp.rundir import newest_complete

DROPOUT = {"tp2": (LLAMA, GPTJ), "tp4": (), "pp4 1f1b M6": (GPT2,), "dp4 zero2": (), "tp2 pp2 dp2 zero3": (GPT2,),
           "cp2 ring": (GPT2,), "tp2 cp2 ulysses": ()}


@pairs(DROPOUT, (GPT2, LLAMA, GPTJ, MIXTRAL), DROPOUT)
def test_dropout_is_equal_on_every_layout(engine: Engine, model: str, name: str) -> None:
    one = engine(model, "train.dropout=0.2")
    assert one.distance(engine(model)) > WRONG, "dropout must change something"
    assert engine(model, "train.dropout=0.2", *LAYOUTS[name]).distance(one) < EXACT


@pytest.mark.parametrize("model", cases([GPT2, MIXTRAL, LLAMA], (GPT2, MIXTRAL)))
def test_attention_that_drops_weights_sees_what_all_others_see(engine: Engine, reference: Reference, model: str) -> None:
    """With a probability so small that nothing is dropped."""
    assert engine(model, "train.dropout=1e-14", *LAYOUTS["tp2"]).distance(reference(model)) < EXACT


BF16 = {"tp2": (MIXTRAL,), "pp2 1f1b M3": (TIED,), "dp2 zero0": (), "dp2 zero3": (GPT2,), "tp2 pp2 dp2 zero1": ()}


@pairs(BF16, (GPT2, TIED, GPTJ, MIXTRAL), BF16)
def test_bf16_computes_in_bf16_over_fp32_masters(engine: Engine, model: str, name: str) -> None:
    whole = engine(model, 'train.precision="fp32"')
    result = engine(model, 'train.precision="bf16"', *LAYOUTS[name])
    assert 1e-5 < result.distance(whole) < 3e-2, "bf16 keeps 8 bits: near fp32, and not equal"
    assert {rank.formats for rank in result.ranks} == {frozenset({"float32"})}


def test_a_checkpoint_of_bf16_has_the_masters(launched: Launched) -> None:
    newest, _ = newest_complete(launched(GPT2, 'train.precision="bf16"', *LAYOUTS["dp2 zero3"]).checkpoints)
    assert newest is not None
    for path in newest.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F32"}  # noqa: SIM118


LONG = ("train.steps=50", "train.eps=1e-8", "train.learning_rate=1e-3", "train.clip=1.0")
EARLY = 1e-3  # between the losses of bf16 and of fp32 in the first 20 steps; fp16 keeps three bits more
LATE = 6e-3  # in all 50: by then AdamW has amplified single roundings, of fp16 too, by an amount that depends on the processor


@pytest.mark.prove
@pytest.mark.parametrize(("precision", "early"), [("bf16", EARLY), ("fp16", EARLY / 4)])
@pytest.mark.parametrize(("model", "name"), [(GPT2, "one"), (LLAMA, "tp2 pp2 dp2 zero2"), (TIED, "dp2 zero3")])
def test_fifty_steps_of_16_bits_over_fp32_masters(engine: Engine, model: str, name: str, precision: str, early: float) -> None:
    whole = engine(model, 'train.precision="fp32"', *LONG)
    assert whole.losses[0] - whole.losses[-1] > 0.5, "the model must learn, or nothing is shown"
    found = engine(model, f'train.precision="{precision}"', *LONG, *LAYOUTS.get(name, ()))
    apart = [abs(a - b) for a, b in zip(found.losses, whole.losses, strict=True)]
    assert 0 < max(apart[:20]) < early
    assert max(apart) < LATE


@pytest.mark.prove
@pytest.mark.parametrize(("model", "name"), [
    (TIED, "tp2"), (LLAMA, "tp2 pp2 dp2 zero1"), (TIED, "tp2 pp2 dp2 zero3"), (MIXTRAL, "tp2")])
def test_three_hundred_steps_are_exact(place: Path, engine: Engine, plain: Plain, model: str, name: str) -> None:
    """Rounding that differs once must not grow: norms, rotary tables and softmax in fp64 too."""
    keys = ["train.steps=300", "model.config.num_hidden_layers=2"]
    assert engine(model, *keys, *LAYOUTS[name]).distance(plain(job(place, model, keys))) < EXACT
