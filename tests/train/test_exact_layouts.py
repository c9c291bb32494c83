"""Every layout equals one process of plain transformers and torch.optim, in fp64 to 1e-12: in training and in evaluations, by the
engine alone and as a whole run; and so does every order of ranks, option of a model, and optimizer. Ranks hold the state that the
planner predicts."""

from collections import Counter
from itertools import permutations
from pathlib import Path

import exact
import pytest
import torch
from engines import run_engine
from exact import COVER, EXACT, GPT2, HELD_OUT, LAYOUTS, LLAMA, MIXTRAL, TIED, Engine, Reference, cases, paired, pairs
from layouts import VARIANTS, job, layout, run_whole, write_text
from planting import wrapped

from hpc_mp.train.parallel import context, flash, ring_attention
from hpc_mp.train.parallel.groups import Axis

# Each axis once with a rendezvous, a run directory and a checkpoint; a tied weight at two ends among them.
WHOLE = {
    "tp4": LLAMA, "pp2 gpipe M3": GPT2, "pp4 zero_bubble M6": TIED, "dp4 zero1": GPT2, "dp2 zero2": GPT2, "cp2 ring": GPT2,
    "pp2 dp2 zero3 zero_bubble_v": TIED, "tp2 pp2 dp2 zero2 interleaved_1f1b": GPT2, "sp2 pp2 zero_bubble": GPT2,
    "dp2 cp2 zero1 shard2": TIED, "ep2 dp4 zero3 shard2": MIXTRAL,
}
EVALUATED = exact.covering(exact.together(LAYOUTS))
COVERED = [(model, name) for name, models in COVER.items() for model in models if WHOLE.get(name) != model]


QUICK = {"llama with biases", "llama with a padding row", "gptj, tied", "gpt2 scaled by layer"}
assert VARIANTS.keys() >= QUICK
# Frequencies are those of whole samples, the same on every rank, whichever positions are its own.
FREQUENCIES = [(f"{model} with {kind}", name) for model in (LLAMA, "qwen2", MIXTRAL) for kind in ("longrope", "dynamic", "yarn")
               for name in ("cp2 ring", "cp2 ulysses", "pp2 1f1b M3", "pp2 cp2 ring zero_bubble", "dp2 cp2 zero3")]
QUICK_FREQUENCIES = {("llama with longrope", "cp2 ring"), ("qwen2 with longrope", "cp2 ulysses"),
                     ("mixtral with longrope", "cp2 ring"), ("llama with dynamic", "cp2 ulysses")}


@pytest.mark.parametrize(("model", "name"), [
    *COVERED, *paired(["pp2 1f1b M3", "tp2 pp2 dp2 zero2"], [exact.UNTIED], {"pp2 1f1b M3": (exact.UNTIED,)}),
    *paired(["tp2", "tp2 pp2 M3", "tp2 pp2 dp2 zero1"], VARIANTS, {"tp2": tuple(QUICK)}), *cases(FREQUENCIES, QUICK_FREQUENCIES)])
def test_a_layout_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *LAYOUTS[name]).distance(reference(model)) < EXACT


@pytest.mark.parametrize(("model", "name"), cases(EVALUATED, ()))
def test_a_layout_evaluates_as_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    """The third step comes after an evaluation, which training does not notice."""
    result = engine(model, *HELD_OUT, *LAYOUTS[name])
    expected = reference(model, *HELD_OUT)
    assert result.distance(expected) < EXACT and [step for step, _, _ in result.evaluations] == [2, 3]
    exact.check_evaluations(result, expected)


def test_any_two_settings_are_evaluated_together() -> None:
    """The proofs that a layout evaluates as one process show what all models with all layouts would. The negative control: each
    of them shows something that no other does."""
    product = exact.together(LAYOUTS)
    every, few = (Counter(fact for case in given for fact in exact.shown(*case)) for given in (product, EVALUATED))
    assert few.keys() == every.keys() and len(EVALUATED) < 0.5 * len(product)
    assert all(1 in [few[fact] for fact in exact.shown(*case)] for case in EVALUATED)


@pytest.mark.parametrize("name", WHOLE)
def test_a_whole_run_equals_one_process(place: Path, reference: Reference, name: str) -> None:
    result, expected = run_whole(job(place, WHOLE[name], [*HELD_OUT, *LAYOUTS[name]])), reference(WHOLE[name], *HELD_OUT)
    assert result.distance(expected) < EXACT
    exact.check_evaluations(result, expected)


ORDERS = ["".join(letters) for letters in permutations("DPT")]


# Pipeline varies fastest here; tensor does in DPT, the order of the layouts above, and data in PTD, among the proofs.
@pairs(ORDERS, (GPT2, LLAMA), {"TDP": (GPT2,)})
def test_every_letter_order_is_exact(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *[*layout(2, 2, 2, microbatches=3), f'parallel.order="{name}"']).distance(reference(model)) < EXACT


SGD = {"tp2": (GPT2,), "pp2 1f1b M3": (LLAMA,), "dp2 zero0": (), "dp2 zero1": (LLAMA,), "dp2 zero3": (GPT2,),
       "tp2 pp2 dp2 zero1": ()}


@pairs(SGD, (GPT2, LLAMA), SGD)
def test_sgd_equals_one_process(engine: Engine, reference: Reference, model: str, name: str) -> None:
    assert engine(model, *exact.OPTIMIZERS["sgd"], *LAYOUTS[name]).distance(reference(model, *exact.OPTIMIZERS["sgd"])) < EXACT


# --- context parallelism ---------------------------------------------------------------------------------------------


few_queries = wrapped(ring_attention, "QUERIES", lambda queries: 5)  # a chunk has several stretches, the last of them shorter
plain_products = wrapped(flash, "computes", lambda computes: lambda query: False)


@pytest.mark.parametrize("overrides", [
    pytest.param((), id="plain"), pytest.param(("train.dropout=0.2",), id="dropout", marks=pytest.mark.prove)])
def test_plain_products_of_queries_in_several_stretches(place: Path, engine: Engine, overrides: tuple[str, ...]) -> None:
    one, spec = engine(LLAMA, *overrides), job(place, LLAMA, [*overrides, *LAYOUTS["cp2 ring"]])
    assert run_engine(spec, before=lambda: (few_queries(), plain_products())[0]).distance(one) < EXACT


def test_a_checkpoint_goes_on_with_other_context_ranks(place: Path, engine: Engine, launched: exact.Launched) -> None:
    """Two steps on D1 C4 (ring), the third one on T2 D2: as three steps on any layout."""
    one = engine(GPT2)
    half = launched(GPT2, "train.steps=2", *LAYOUTS["cp4 ring"])
    rest = run_whole(job(place, GPT2, [f'checkpoint.resume="{half.path}"', *layout(2, data=2, zero=3)]))
    assert len(rest.losses) == 1
    assert max(float((rest.parameters[name] - one.parameters[name]).abs().max()) for name in one.parameters) < EXACT


def test_chunks_are_balanced() -> None:
    """The two chunks of a rank see as many tokens together as those of any other, and all ranks have all tokens once."""
    axes = [context.ContextAxis(Axis(4, rank), "ring", 24, torch.device("cpu")) for rank in range(4)]
    assert {int((axis.positions + 1).sum()) for axis in axes} == {25 * 24 // 2 // 4}
    assert torch.cat([axis.positions for axis in axes]).sort().values.tolist() == list(range(24))


# --- the state of ranks ----------------------------------------------------------------------------------------------


STATE = ["dp2 zero0", "dp4 zero1", "dp2 zero3",
         "dp4 zero3 shard2 once", "pp2 dp2 zero2 1f1b once", "dp2 zero3 M1 once", "dp4 zero1 shard2", "tp2 pp2 dp2 zero2", "tp4"]


@pairs([*STATE, "pp3 dp2 zero1 layers 0+5+0"], (GPT2, LLAMA, exact.GPTJ, MIXTRAL), COVER | {"tp2 pp2 dp2 zero2": (GPT2, MIXTRAL)})
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, model: str, name: str) -> None:
    exact.check_state(job(place, model, LAYOUTS[name]), engine(model, *LAYOUTS[name]))


FEW_NUMBERS = [f"model.config.{key}={value}" for key, value in {
    "num_hidden_layers": 1, "hidden_size": 4, "intermediate_size": 6, "num_attention_heads": 2, "num_key_value_heads": 1}.items()]


@pytest.mark.parametrize("ranks", cases((6, 192), (6,)))
def test_ranks_without_any_part_of_a_unit_train_too(tmp_path: Path, plain: exact.Plain, ranks: int) -> None:
    """The last norm has four numbers for all of them."""
    few = [*FEW_NUMBERS, "train.steps=2", f"train.global_batch={ranks}"]
    write_text(tmp_path)
    found = run_engine(job(tmp_path, LLAMA, [*few, *layout(data=ranks, zero=1)]))
    assert found.distance(plain(job(tmp_path, LLAMA, few))) < EXACT
