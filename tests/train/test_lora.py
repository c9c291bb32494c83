"""Adapters equal PEFT's in one process on every axis, in fp64 to 1e-12, and nothing else is trained."""

from collections.abc import Callable
from functools import cache, partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from exact import EXACT, LAYOUTS, MIXTRAL, WRONG, Engine, Plain, cases, check_state, keys_of
from layouts import Result, job, layout
from planting import planted, wrapped

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job.layout import check_job, read_shape
from hpc_mp.train.parallel import adapter, groups

LORA = ("lora.rank=3", "lora.alpha=12.0", "train.learning_rate=0.1", "train.eps=0.1")
DROPPED = (*LORA, "lora.dropout=0.3")
SOME = (*LORA, 'lora.modules=["layers.[13].*", "k_proj", "h.2.attn.*"]')  # other ones in some layers than in others
ATTENTION = 'lora.modules=["self_attn.*"]'

Adapted = Callable[..., Result]

AXES = {
    "tp2": LAYOUTS["tp2"],
    "tp3": LAYOUTS["tp3"],
    "tp8": layout(8),  # more ranks than key-value heads
    "pp2": LAYOUTS["pp2 1f1b M3"],
    "pp2 zero_bubble_v": LAYOUTS["pp2 zero_bubble_v M4"],
    "pp3 layers 0+5+0": [*layout(1, 3, microbatches=3), "parallel.partition=[0, 5, 0]"],  # ends without adapters
    "zero0": LAYOUTS["dp2 zero0"],
    "zero2": LAYOUTS["dp2 zero2"],
    "zero3": LAYOUTS["dp2 zero3"],
    "sequence": layout(2, sequence="true"),
    "attention whole": layout(2, sequence="true", tensor_modules='["*mlp*"]'),
    "context ring": LAYOUTS["cp2 ring"],
    "context ulysses": LAYOUTS["cp2 ulysses"],
    "tp2 pp2": layout(2, 2, microbatches=3),
    "tp2 pp2 dp2 zero1": LAYOUTS["tp2 pp2 dp2 zero1"],
    "recompute full zero3": [*LAYOUTS["dp2 zero3"], 'parallel.recompute="full"'],
    "offload": [*LAYOUTS["dp2 zero3"], 'parallel.offload=["optimizer", "parameters"]'],
}
DENSE = ("llama", "gpt2", "gpt_neox")
QUICK = {("llama", "tp2 pp2"), ("gpt2", "sequence"), ("llama", "zero3"), ("llama", "tp8"), ("gpt_neox", "pp3 layers 0+5+0")}


@pytest.fixture(scope="session")
def adapted(place: Path, engine: Engine, plain: Plain) -> Adapted:
    """``adapted(model, *overrides)``: the result of PEFT, which one rank equals; computed once."""

    @cache
    def compute(model: str, *keys: str) -> Result:
        found, one = plain(job(place, model, keys)), engine(model, *keys)
        assert all(values.any() for values in found.parameters.values()), "every B must move"
        assert one.distance(found) < EXACT
        return found

    return compute


@pytest.mark.parametrize(("model", "name"), cases([(model, name) for model in DENSE for name in AXES], QUICK))
def test_adapters_equal_those_of_peft(engine: Engine, adapted: Adapted, model: str, name: str) -> None:
    assert engine(model, *LORA, *AXES[name]).distance(adapted(model, *LORA)) < EXACT


BOTH = ('lora.modules=["self_attn.*", "experts.*"]',)  # PEFT takes the names of dense MLPs for those of experts
# A scaled embedding, experts in some layers, one norm for attention and MLP, biases.
OTHERS: dict[str, tuple[str, ...]] = {"gemma2": (), "qwen3_moe": BOTH, "gptj": (), "qwen2": ()}


@pytest.mark.prove
@pytest.mark.parametrize("model", OTHERS)
def test_every_family_can_have_adapters(engine: Engine, adapted: Adapted, model: str) -> None:
    keys = (*LORA, *OTHERS[model])
    assert engine(model, *keys, *AXES["tp2"]).distance(adapted(model, *keys)) < EXACT


EXPERTS = ("ep2 zero0", "ep2 zero1", "ep2 zero3", "ep3 zero1", "tp2 ep2 zero2", "sp2 ep2 zero3", "sp2 ep2 experts whole",
           "pp2 ep2 zero_bubble", "ep2 zero3 full")


@pytest.mark.parametrize("name", cases(EXPERTS, ("ep2 zero1", "sp2 ep2 zero3")))
def test_adapters_of_experts_equal_those_of_peft(engine: Engine, adapted: Adapted, name: str) -> None:
    assert engine(MIXTRAL, *LORA, *LAYOUTS[name]).distance(adapted(MIXTRAL, *LORA)) < EXACT


def test_some_experts_have_a_capacity(engine: Engine) -> None:
    """Rows of no choice have no gradient."""
    keys = (*LORA, "train.expert_capacity=0.75")
    assert engine(MIXTRAL, *keys, *LAYOUTS["ep2 zero1"]).distance(engine(MIXTRAL, *keys)) < EXACT
    assert engine(MIXTRAL, *keys).distance(engine(MIXTRAL, *LORA)) > WRONG


@pytest.mark.parametrize("name", cases(("pp2", "tp2", "zero3", "tp2 pp2"), ("pp2",)))
def test_modules_of_some_layers_have_adapters(engine: Engine, adapted: Adapted, name: str) -> None:
    """The first layer and the last one have an adapter of k alone: what lies before it has no gradient."""
    assert engine("llama", *SOME, *AXES[name]).distance(adapted("llama", *SOME)) < EXACT


def test_rslora_divides_by_the_root_of_the_rank(engine: Engine, adapted: Adapted) -> None:
    keys = (*LORA, "lora.rslora=true", ATTENTION)
    assert adapted("llama", *keys).distance(adapted("llama", *LORA, ATTENTION)) > WRONG


@pytest.mark.parametrize("name", cases(("tp2", "tp3", "pp2", "sequence", "attention whole", "context ring", "context ulysses",
                                        "recompute full zero3"), ("tp3", "sequence")))
@pytest.mark.parametrize("model", cases(("llama", "gpt2"), ("llama",)))
def test_layouts_drop_the_same_inputs(engine: Engine, model: str, name: str) -> None:
    one = engine(model, *DROPPED)
    assert engine(model, *DROPPED, *AXES[name]).distance(one) < EXACT
    assert one.distance(engine(model, *LORA)) > WRONG


without_compiler = wrapped(torch, "compile", lambda compile_: partial(compile_, backend="aot_eager"))


@pytest.mark.prove
@pytest.mark.parametrize("model", ["llama", MIXTRAL])
def test_compiled_blocks_have_adapters(place: Path, engine: Engine, model: str) -> None:
    keys = (*(DROPPED if model == "llama" else LORA), 'train.precision="fp32"')
    compiled = run_engine(job(place, model, [*keys, "train.compile=true"]), before=without_compiler)
    assert compiled.distance(engine(model, *keys)) < 1e-4


# --- state -----------------------------------------------------------------------------------------------------------

HELD = {
    "zero0": AXES["zero0"], "tp2 dp2 zero1": keys_of([], {"tensor": 2, "data": 2, "zero": 1}), "zero2": AXES["zero2"],
    "zero3": AXES["zero3"], "offload": AXES["offload"], "bf16": ['train.precision="bf16"', *LAYOUTS["dp2 zero1"]],
    "offload from ends without adapters": [*AXES["pp3 layers 0+5+0"], 'parallel.offload=["optimizer"]'],
    "bf16 zero3": ['train.precision="bf16"', *LAYOUTS["dp2 zero3"]],
}


@pytest.mark.parametrize("name", cases(HELD, ("tp2 dp2 zero1", "bf16 zero3", "offload from ends without adapters")))
def test_only_adapters_have_state(place: Path, engine: Engine, name: str) -> None:
    """The planner knows it to the byte."""
    spec, result = job(place, "llama", [*LORA, *HELD[name]]), engine("llama", *LORA, *HELD[name])
    check_state(spec, result)


def test_the_optimizer_holds_two_numbers_for_each_of_an_adapter(engine: Engine) -> None:
    result = engine("llama", *LORA)
    numbers = sum(values.numel() for values in result.parameters.values())
    held, = (rank.memory for rank in result.ranks)
    aligned = 5 * 8  # numbers at most that fill up the unit of each layer
    assert 0 <= held["optimizer"] / 8 - 2 * numbers < 2 * aligned and 0 <= held["gradients"] / 8 - numbers < aligned


def test_a_base_in_16_bits_has_no_masters(place: Path, engine: Engine) -> None:
    """Adapters are updated in fp32 and trained as in fp32, up to rounding."""
    half, single = (engine("llama", *LORA, f'train.precision="{precision}"', *LAYOUTS["dp2 zero1"])
                    for precision in ("bf16", "fp32"))
    assert {*half.ranks[0].formats} == {"float32"} and abs(half.losses[-1] - single.losses[-1]) < 2e-2
    assert half.ranks[0].memory["parameters"] < 0.6 * single.ranks[0].memory["parameters"]


# --- negative controls -----------------------------------------------------------------------------------------------

own_shares = wrapped(groups.Groups, "sharing", lambda sharing: lambda self, slot: (
    groups.Axis() if ".lora_" in slot.weight.name else sharing(self, slot)))


@planted(adapter.Adapter, "forward")
def twice_as_strong(forward: Callable[..., Any], self: adapter.Adapter, x: Any) -> Any:
    return 2 * forward(self, x)


@planted(adapter.InputDropout, "__init__")
def inputs_from_zero(init: Callable[..., None], self: adapter.InputDropout, *given: Any) -> None:
    init(self, *given)
    self.first = 0


@planted(adapter.InputDropout, "__init__")
def tokens_from_zero(init: Callable[..., None], self: adapter.InputDropout, *given: Any) -> None:
    init(self, *given)
    self.rows = self.rows - self.rows[0]


# control: (the fault, the model, the job, the layout)
CONTROLS: dict[str, tuple[Callable[[], None], str, tuple[str, ...], list[str]]] = {
    "shares of the whole factors are not summed": (own_shares, "llama", LORA, AXES["tp2"]),
    "shares of the experts' whole factors are not summed": (
        own_shares, MIXTRAL, (*LORA, 'lora.modules=["experts.*"]'), LAYOUTS["tp2"]),
    "the scale is doubled": (twice_as_strong, "llama", LORA, []),
    "inputs are counted from zero": (inputs_from_zero, "llama", DROPPED, AXES["tp2"]),
    "tokens are counted from zero": (tokens_from_zero, "llama", DROPPED, AXES["context ulysses"]),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_what_is_broken_is_seen(place: Path, engine: Engine, control: str) -> None:
    sabotage, model, keys, where = CONTROLS[control]
    assert run_engine(job(place, model, [*keys, *where]), before=sabotage).distance(engine(model, *keys)) > WRONG


# --- refusals --------------------------------------------------------------------------------------------------------

REFUSED: dict[str, tuple[str, list[str], str]] = {
    "alpha alone": ("llama", ["lora.alpha=8.0"], "has no effect without lora.rank"),
    "rank beside adapters": ("llama", ["lora.rank=2", 'lora.pretrained="adapters"'], "has no effect beside lora.pretrained"),
    "no such projection": ("llama", ["lora.rank=2", 'lora.modules=["q_proj", "query"]'],
                           "matches no projection of a block with 'query'"),
    "the head": ("llama", ["lora.rank=2", 'lora.modules=["lm_head"]'], "embedding, head, norms and routers keep their values"),
    "dropout of experts": (MIXTRAL, ["lora.rank=2", "lora.dropout=0.1"], "is not supported for model.layers.0.mlp.experts"),
}


@pytest.mark.parametrize("name", REFUSED)
def test_what_cannot_be_is_refused(place: Path, name: str) -> None:
    model, overrides, words = REFUSED[name]
    with pytest.raises(HpcMpError) as refusal:
        spec = job(place, model, overrides)
        check_job(spec, read_shape(spec))
    assert words in str(refusal.value)
