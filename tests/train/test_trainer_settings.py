"""Settings of a step that trainers expect, on layouts: schedules, rates of groups, label smoothing and the z loss."""

from collections.abc import Callable
from pathlib import Path

import pytest
from engines import run_engine
from exact import EXACT, HELD_OUT, LAYOUTS, ONE_STEP, WRONG, Engine, Reference, cases
from layouts import job
from planting import wrapped

from hpc_mp.job.spec import Train
from hpc_mp.layout.optimizers import has_no_decay
from hpc_mp.train.model import vocabulary
from hpc_mp.train.optimizer import optimizer

SMOOTHED = ("train.label_smoothing=0.2",)
Z = ("train.z_loss=0.05",)
GPT2_RATES = ('train.lr_factors={"*wte*" = 0.1, "*.mlp.*" = 3.0, "*.2.*" = 0.0}',)
LLAMA_RATES = ('train.lr_factors={"*embed*" = 0.1, "*.mlp.*" = 3.0, "*.2.*" = 0.0, "model.*" = 1.5}',)
SCHEDULE = ('train.lr_schedule="cosine_with_min_lr"', "train.lr_schedule_options={min_lr_rate = 0.3}", "train.warmup_steps=1")
ALL = (*SMOOTHED, *Z, *SCHEDULE)

CASES = [
    ("llama", "tp2", (*ALL, *LLAMA_RATES)), ("gpt2", "pp2 1f1b M3", (*ALL, *GPT2_RATES)),
    ("llama-tied", "dp2 zero3", (*ALL, *HELD_OUT, "train.steps=5", "train.learning_rate=0.03")),
    ("gpt2", "sp2 pp2 zero_bubble", (*ALL, *GPT2_RATES)),
    ("gemma2", "tp2", ALL), ("llama", "tp2 pp2 dp2 zero1", (*ALL, *LLAMA_RATES)), ("gpt2", "cp2 ring", (*ALL, *GPT2_RATES)),
]
QUICK = CASES[:3]


@pytest.mark.parametrize(("model", "name", "keys"), cases(CASES, QUICK))
def test_every_layout_trains_as_plain_torch(engine: Engine, reference: Reference, model: str, name: str,
                                            keys: tuple[str, ...]) -> None:
    assert engine(model, *keys, *LAYOUTS[name]).distance(reference(model, *keys)) < EXACT


def test_a_factor_of_zero_keeps_a_parameter(engine: Engine) -> None:
    few, many = (engine("gpt2", *GPT2_RATES, *keys).parameters for keys in ((), (ONE_STEP,)))
    kept = {name for name, values in few.items() if values.equal(many[name])}
    assert kept == {name for name in few if ".2." in name and ".mlp." not in name} and kept


def test_norms_are_known_by_their_shape_whatever_their_names() -> None:
    patterns = Train(steps=1, global_batch=1).no_decay
    spared = {name: has_no_decay(name, shape, patterns) for name, shape in (
        ("model.layers.0.post_norm1.weight", (64,)), ("1.weight", (64,)), ("model.layers.0.self_attn.sinks", (4,)),
        ("model.layers.0.mlp.experts.down_proj_bias", (8, 64)), ("model.layers.0.mlp.down_proj.weight", (64, 172)),
        ("model.embed_norm.projection.weight", (64, 64)))}
    assert list(spared.values()) == [True, True, True, True, False, False]
    assert not has_no_decay("model.layers.0.post_norm1.weight", (64,), ("*.bias", "*[nN]orm.weight")), "names alone miss it"


def own_words_alone() -> None:
    """Every tensor rank spreads labels over its own words, and knows nothing of the others."""
    wrapped(vocabulary.NextToken, "over_axis", lambda over: lambda self, own, wanted: (over(self, own, wanted)[0], wanted))()


PLANTED: dict[str, tuple[tuple[str, ...], Callable[[], None]]] = {
    "labels that are not spread": (SMOOTHED, wrapped(vocabulary, "_slopes", lambda slopes: lambda *given: slopes(
        *given[:-1], given[-1]._replace(every=0.0, own=1.0)))),
    "labels spread over own words": (SMOOTHED, own_words_alone),
    "a z loss without a gradient": (Z, wrapped(vocabulary, "_slopes", lambda slopes: lambda *given: slopes(
        *given[:-1], given[-1]._replace(z=0.0)))),
    "one rate for all": (LLAMA_RATES, wrapped(optimizer, "_treatment", lambda treatment: lambda weight, **given: (
        treatment(weight, **given)[0], 1.0))),
    "vectors that decay": ((), wrapped(optimizer, "has_no_decay", lambda _: lambda name, shape, patterns: name.endswith("bias"))),
}


@pytest.mark.parametrize("fault", PLANTED)
def test_a_planted_fault_is_seen(place: Path, engine: Engine, fault: str) -> None:
    keys, plant = PLANTED[fault]
    spoilt = run_engine(job(place, "llama", [ONE_STEP, *keys, *LAYOUTS["tp2"]]), before=plant)
    assert spoilt.distance(engine("llama", ONE_STEP, *keys)) > WRONG
