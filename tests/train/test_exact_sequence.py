"""Sequence parallelism, key-value heads that ranks share, chosen modules, and ranks without a row of the vocabulary equal one
process, in fp64 to 1e-12."""

from itertools import product
from pathlib import Path

import pytest
from exact import EXACT, Engine, Plain, Reference, Trained, cases, check_state
from layouts import job, layout, write_text
from token_files import words

DROPOUT = "train.dropout=0.1"
ONE, TWO, THREE = "llama with one key-value head", "llama with two key-value heads", "llama with three key-value heads"


@pytest.mark.parametrize(("model", "overrides"), [
    ("gpt2", layout(2, sequence="true")),
    ("gpt2", layout(2, 2, sequence="true", schedule="zero_bubble", microbatches=2, tensor_modules=["*.mlp"])),
    pytest.param(TWO, layout(4, sequence="true"), marks=pytest.mark.prove),
    pytest.param("gpt2", layout(4, 2, sequence="true", microbatches=3), marks=pytest.mark.prove),
    pytest.param("llama", layout(2, data=2, zero=3, sequence="true"), marks=pytest.mark.prove)])
def test_every_rank_draws_the_dropout_of_its_own_tokens(engine: Engine, model: str, overrides: list[str]) -> None:
    one = engine(model, DROPOUT)
    assert engine(model, *overrides, DROPOUT).distance(one) < EXACT
    assert one.distance(engine(model)) > 1e-3, "dropout does something"


@pytest.mark.parametrize(("tensor", "length"), [(2, 23), *(pytest.param(4, n, marks=pytest.mark.prove) for n in (22, 7))])
def test_ranks_may_have_different_numbers_of_tokens(place: Path, engine: Engine, plain: Plain, tensor: int, length: int) -> None:
    size = f"data.sequence_length={length}"
    one = engine("gpt2", size)
    assert one.distance(plain(job(place, "gpt2", [size]))) < EXACT
    assert engine("gpt2", size, *layout(tensor, 2, sequence="true")).distance(one) < EXACT


@pytest.mark.parametrize(("model", "overrides"), [
    (TWO, layout(4)),
    pytest.param(ONE, layout(4, data=2, zero=1), marks=pytest.mark.prove),
    (TWO, layout(4, data=2, zero=3, microbatches=2, sequence="true")),
    *(pytest.param(model, [*layout(4, 2, zero=0, microbatches=3, sequence=sequence), "train.weight_decay=0.3"],
                   marks=pytest.mark.prove) for model in (ONE, TWO) for sequence in ("true", "false"))])
def test_ranks_that_share_key_value_heads_equal_one_process(engine: Engine, model: str, overrides: list[str]) -> None:
    training = [each for each in overrides if each.startswith("train.")]
    assert engine(model, *overrides).distance(engine(model, *training)) < EXACT


@pytest.mark.parametrize(("model", "tensor"), cases(product((ONE, TWO, THREE), (2, 3, 4, 6, 8)), {(TWO, 3), (THREE, 2)}))
def test_any_number_of_key_value_heads_on_any_number_of_ranks(engine: Engine, reference: Reference, model: str,
                                                              tensor: int) -> None:
    """8 or 9 heads: whole groups of them on a rank, or a part of one."""
    assert engine(model, *layout(tensor)).distance(reference(model)) < EXACT


UNEVEN = {"tp3 sp": layout(3, sequence="true"), "tp3 dropout": [*layout(3, 2, microbatches=2), DROPOUT],
          "tp3 dp2 zero3": layout(3, data=2, zero=3, microbatches=2, sequence="true"),
          "tp6 zero bubble": layout(6, schedule="zero_bubble", recompute="full", sequence="true"),
          "tp2 cp2 ring": layout(2, context=2), "tp2 cp2 ulysses": layout(2, context=2, context_method='"ulysses"'),
          "cp4 ulysses": [*layout(context=4, context_method='"ulysses"'), DROPOUT]}


@pytest.mark.parametrize(("model", "name"), cases(product((TWO, THREE), UNEVEN), {(TWO, "tp3 dropout"), (THREE, "cp4 ulysses")}))
def test_uneven_heads_on_products_of_axes(engine: Engine, model: str, name: str) -> None:
    assert engine(model, *UNEVEN[name]).distance(engine(model, *(key for key in UNEVEN[name] if key == DROPOUT))) < EXACT


@pytest.mark.parametrize("tensor", cases((4, 3), (3,)))
def test_the_predicted_state_of_shared_heads_is_what_ranks_hold(place: Path, engine: Engine, tensor: int) -> None:
    overrides = layout(tensor, data=2, zero=3, microbatches=2, sequence="true")
    check_state(job(place, TWO, overrides), engine(TWO, *overrides))


def test_one_process_with_shared_heads_is_exact_too(reference: Reference) -> None:
    assert reference(TWO) and reference(ONE) and reference(THREE)


GROUPS = {"tp2": layout(2, microbatches=2), "sp2": layout(2, microbatches=2, sequence="true"),
          "tp2 pp2": layout(2, 2, microbatches=2), "sp2 dp2 zero2": layout(2, data=2, zero=2, microbatches=2, sequence="true"),
          "sp2 pp2 dp2 zero3": layout(2, 2, 2, zero=3, microbatches=2, sequence="true", schedule="zero_bubble")}
CHOSEN = [
    ("gpt2-untied", ["*.mlp"], "sp2"), ("llama", ["*.self_attn"], "sp2 dp2 zero2"), ("llama-tied", ["*.embed_tokens"], "tp2 pp2"),
    ("llama", ["*.[0-3].*", "lm_head"], "sp2"), ("llama", ["*.mlp"], "tp2"), ("gpt2-untied", ["*.2.*"], "sp2 pp2 dp2 zero3"),
    ("gpt2-untied", ["*.attn", "*.wte"], "sp2")]
QUICK = 4  # of these are in ``make test``
MORE = [(model, patterns, name) for model, patterns, _ in CHOSEN for name in GROUPS if (model, patterns, name) not in CHOSEN]


@pytest.mark.parametrize(("model", "patterns", "name"), cases([*CHOSEN, *MORE], CHOSEN[:QUICK]))
def test_modules_that_are_not_chosen_stay_whole(engine: Engine, reference: Reference, model: str, patterns: list[str],
                                                name: str) -> None:
    assert engine(model, *GROUPS[name], f"parallel.tensor_modules={patterns}").distance(reference(model)) < EXACT


@pytest.mark.parametrize(("tied", "overrides"), [
    ("true", layout(4)), ("false", layout(4, sequence="true")),
    *(pytest.param(tied, overrides, marks=pytest.mark.prove) for tied in ("true", "false")
      for overrides in (layout(4, sequence="true", data=2, zero=3, microbatches=2), layout(4, 2, microbatches=2)))])
def test_ranks_without_a_row_of_the_vocabulary_compute_along(tmp_path: Path, trained: Trained, plain: Plain, tied: str,
                                                             overrides: list[str]) -> None:
    """5 words and an MLP of 5 over 4 ranks: 2, 2, 1 and nothing."""
    write_text(tmp_path)
    given = words(tmp_path / "words", ["?", "def", "return", "the", "self"])
    model = ('{model_type = "llama", num_hidden_layers = 2, hidden_size = 16, num_attention_heads = 4, num_key_value_heads = 4, '
             f"intermediate_size = 5, vocab_size = 5, max_position_embeddings = 32, tie_word_embeddings = {tied}}}")
    small = [f"model.config={model}", f'data.tokenizer="{given}"']
    one = trained(job(tmp_path, "llama", small))
    assert one.distance(plain(job(tmp_path, "llama", small))) < EXACT
    assert trained(job(tmp_path, "llama", [*small, *overrides])).distance(one) < EXACT
