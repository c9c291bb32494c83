"""How a model is cut: into stages by each value of parallel.partition, and over tensor ranks; and what is refused."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import asdict, replace
from itertools import combinations, pairwise
from math import prod
from pathlib import Path
from typing import Any

import pytest
from hypothesis import assume, given
from hypothesis import strategies as st
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import check_job, layout_of, measured_with, profile_of, read_shape, stage_cut
from hpc_mp.layout import models
from hpc_mp.layout.flat import rank_units, stage_spans, unit_weights
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.model_profile import ModelProfile, UnitProfile, write_profile
from hpc_mp.layout.models import FAMILIES, TensorCut, left_whole
from hpc_mp.layout.models.family import column
from hpc_mp.layout.models.tensor import heads_of, part_of
from hpc_mp.layout.placement import Degrees

NAMES = {"gpt2": ("transformer.h", "transformer.ln_f"), "llama": ("model.layers", "model.norm")}


def spec_of(stages: int, model: str = "llama", base: Path = Path("/"), config: dict[str, Any] | None = None,
            **more: Any) -> JobSpec:
    sizes = {"num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 4,
             "intermediate_size": 160, "vocab_size": 1024} | (config or {})
    if model in ("gpt2", "gptj"):
        names = {"num_hidden_layers": "n_layer", "hidden_size": "n_embd", "num_attention_heads": "n_head"}
        sizes = {names.get(key, key): value for key, value in sizes.items()}
        sizes |= {"rotary_dim": 8} if model == "gptj" else {}
    sizes = {key: value for key, value in sizes.items() if key in FAMILIES[model].fields}
    return resolve({
        "job": {"ranks_per_node": stages, "directory": "runs"}, "data": {"files": ["x"], "sequence_length": 32},
        "model": {"config": {"model_type": model, **sizes}}, "train": {"steps": 1, "global_batch": 8},
        "parallel": {"pipeline": stages, "microbatches": 2, **more}}, base)


def cut(*args: Any, **more: Any) -> tuple[int, ...]:
    spec = spec_of(*args, **more)
    shape = read_shape(spec)
    check_job(spec, shape)
    return layout_of(spec, shape).layers


def held(spec: JobSpec, layers: tuple[int, ...]) -> list[int]:
    """Parameters of every stage, as the engine allocates them."""
    shape = read_shape(spec)
    units = [unit_weights(models.family_of(shape), shape, span) for span in stage_spans(layers)]
    return [sum(prod(weight.shape) for weights in each.values() for weight in weights) for each in units]


def cuts(layers: int, stages: int) -> list[tuple[int, ...]]:
    return [tuple(end - begin for begin, end in pairwise((0, *inner, layers)))
            for inner in combinations(range(layers + 1), stages - 1)]


@given(st.sampled_from(sorted(FAMILIES)), st.integers(1, 6), st.integers(4, 6), st.sampled_from([8, 200, 3000]), st.booleans())
def test_parameters_make_the_largest_stage_as_small_as_it_can_be(model: str, stages: int, layers: int, vocabulary: int,
                                                                 tied: bool) -> None:
    assume(FAMILIES[model].fields["tie_word_embeddings"].holds(tied))
    spec = spec_of(stages, model, partition="parameters", config={
        "num_hidden_layers": layers, "vocab_size": vocabulary, "tie_word_embeddings": tied})
    found = layout_of(spec, read_shape(spec)).layers
    assert max(held(spec, found)) == min(max(held(spec, other)) for other in cuts(sum(found), stages))


def test_uniform_counts_layers_alone() -> None:
    assert cut(4, partition="uniform", config={"vocab_size": 10**6}) == (3, 3, 3, 3)
    assert cut(5, partition="uniform") == (2, 2, 2, 3, 3)
    assert cut(14, partition="uniform") == (0, *[1] * 12, 0)


def test_a_costly_head_stands_alone_where_that_balances_better() -> None:
    big = {"vocab_size": 10**5}
    assert cut(4, partition="cost", config=big) == cut(4, config=big) == (4, 4, 4, 0)
    assert cut(4, partition="parameters", config=big) == (0, 6, 6, 0)
    assert cut(4, config={"vocab_size": 64}) == (3, 3, 3, 3)
    assert cut(1, partition="parameters", config=big) == (12,)


@pytest.mark.parametrize("model", NAMES)
def test_stages_begin_where_a_pattern_matches(model: str) -> None:
    blocks, norm = NAMES[model]
    assert cut(3, model, partition=f"at:{blocks}.(4|9)$") == (4, 5, 3)
    assert cut(2, model, partition=f"at:{blocks}.1") == (1, 11), "whole names: 10 and 11 do not match"
    assert cut(2, model, partition=f"at:{blocks}.0") == (0, 12)
    assert cut(3, model, partition=f"at:{blocks}.3|{norm}") == (3, 9, 0)
    assert cut(1, model, partition="at:none") == (12,)
    with pytest.raises(HpcMpError, match=r"matches 3 modules .*, but 1 of the 2 stages begin at one.*whole name"):
        cut(2, model, partition=rf"at:{blocks}.1\d?")


def test_the_reason_tells_the_balance() -> None:
    def why(*args: Any, **more: Any) -> str:
        spec = spec_of(*args, **more)
        return stage_cut(spec, read_shape(spec)).why

    assert why(3, partition="uniform", config={"num_hidden_layers": 4}) == (
        "the most even cut in numbers of layers: 0.75, 0.75, 1.50 of the mean")
    assert why(2).startswith("the most even cut in cost") and why(1) == "one stage has all layers"
    assert why(12, partition="uniform") == "the most even cut in numbers of layers: 1.00 to 1.00 of the mean"
    assert why(2, partition=[5, 7]) == "as given"


# --- what was measured --------------------------------------------------------------------------------------


def measured(tmp_path: Path, embedding: tuple[float, int], block: tuple[float, int], head: tuple[float, int],
             stages: int = 3, **more: Any) -> JobSpec:
    """A job with a profile of (seconds, bytes) of its units."""
    spec = spec_of(stages, base=tmp_path, partition="profile", **more)
    first, middle, last = (UnitProfile(seconds, size // 2, size - size // 2) for seconds, size in (embedding, block, head))
    write_profile(spec.profile, ModelProfile("cpu", 3, measured_with(spec, read_shape(spec)), first, (middle,), last))
    return spec


def test_a_profile_is_read_as_it_was_written(tmp_path: Path) -> None:
    spec = measured(tmp_path, (0.25, 10), (0.5, 20), (1.5, 33), profile="here/p.json")
    assert spec.profile == tmp_path / "here/p.json"
    assert json.dumps(asdict(profile_of(spec, read_shape(spec))), indent=1) == spec.profile.read_text().strip()
    assert profile_of(spec, read_shape(spec)).head == UnitProfile(1.5, 16, 17)
    assert spec_of(3, base=tmp_path, partition="profile").profile == tmp_path / "runs/.cache/profile-job.json"


def test_memory_weight_moves_layers_from_balanced_time_to_balanced_memory(tmp_path: Path) -> None:
    """The head takes the time of four blocks, the embedding the memory of six."""
    def layers(weight: float | None) -> tuple[int, ...]:
        spec = measured(tmp_path, (0.0, 600), (1.0, 100), (4.0, 0), **({} if weight is None else {"memory_weight": weight}))
        return layout_of(spec, read_shape(spec)).layers

    assert layers(0.0) == (5, 5, 2), "16 seconds over three stages"
    assert layers(1.0) == (0, 6, 6), "1,800 bytes over three stages"
    assert layers(None) == layers(0.0) != layers(0.8), "a step waits for the longest stage, whatever the fullest one holds"
    for weight, words in ((None, "measured time:"), (0.0, "measured time:"), (0.8, "measured time and memory:")):
        spec = measured(tmp_path, (0.0, 600), (1.0, 100), (4.0, 0), **({} if weight is None else {"memory_weight": weight}))
        assert f"the most even cut in {words}" in stage_cut(spec, read_shape(spec)).why


@pytest.mark.parametrize(("spread", "words"), table(__file__, "stages.toml", "noise"))
def test_the_reason_tells_how_noisy_a_profile_was(tmp_path: Path, spread: tuple[float, ...], words: str) -> None:
    spec = measured(tmp_path, (0.0, 600), (1.0, 100), (4.0, 0))
    tree = json.loads(spec.profile.read_text())
    units = tree["embedding"], tree["blocks"][0], tree["head"]
    for unit, value in zip(units, spread, strict=True):
        unit["spread"] = value
    spec.profile.write_text(json.dumps(tree))
    assert stage_cut(spec, read_shape(spec)).why.endswith(words)
    for unit in units:  # a file of an earlier release
        del unit["spread"]
    spec.profile.write_text(json.dumps(tree))
    assert stage_cut(spec, read_shape(spec)).why.endswith("of the mean")


def test_layers_of_each_kind_count_as_measured(tmp_path: Path) -> None:
    """In the first six layers a sliding window saves half of the time."""
    kinds = ["sliding_attention"] * 6 + ["full_attention"] * 6
    spec = spec_of(3, "gemma2", tmp_path, {"layer_types": kinds, "head_dim": 16}, partition="profile")
    units = UnitProfile(0.0, 1, 1), (UnitProfile(1.0, 1, 1), UnitProfile(2.0, 1, 1)), UnitProfile(0.0, 1, 1)
    write_profile(spec.profile, ModelProfile("cpu", 3, measured_with(spec, read_shape(spec)), *units))
    assert layout_of(spec, read_shape(spec)).layers == (6, 3, 3)


NANOSECONDS = st.integers(0, 10**10).map(lambda number: number / 1e9)  # a time of 5e-324 s would be rounded to nothing


@given(st.tuples(*[st.tuples(NANOSECONDS, st.integers(0, 10**6))] * 3), st.floats(0, 1), st.integers(1, 5))
def test_a_measured_cut_is_the_best_there_is(tmp_path_factory: pytest.TempPathFactory, units: tuple[tuple[float, int], ...],
                                             weight: float, stages: int) -> None:
    spec = measured(tmp_path_factory.getbasetemp(), *units, stages=stages, memory_weight=weight)
    shape = read_shape(spec)

    def dearest(layers: tuple[int, ...]) -> float:
        totals = [units[0][at] + shape.layers * units[1][at] + units[2][at] for at in (0, 1)]
        each = [[(stage == 0) * units[0][at] + count * units[1][at] + (stage == stages - 1) * units[2][at] for at in (0, 1)]
                for stage, count in enumerate(layers)]
        return max((1 - weight) * seconds / (totals[0] or 1) + weight * size / (totals[1] or 1) for seconds, size in each)

    assert dearest(layout_of(spec, shape).layers) <= min(map(dearest, cuts(shape.layers, stages))) * (1 + 1e-9)


SPOILED: dict[str, tuple[Callable[[dict[str, Any]], Any], str]] = {
    "another width": (lambda tree: tree["measured"].update(hidden=65), "was measured with hidden = 65, but the job has 64"),
    "another precision": (lambda tree: tree["measured"].update(precision="bf16"), "precision = bf16, but the job has fp32"),
    "a unit less": (lambda tree: tree.pop("head"), "is not what --profile writes"),
    "no number": (lambda tree: tree["blocks"][0].update(seconds="fast"), "is not what --profile writes"),
    "less than no time": (lambda tree: tree["blocks"][0].update(seconds=-1.0), "is not what --profile writes"),
    "no time at all": (lambda tree: tree["blocks"][0].update(seconds=float("nan")), "is not what --profile writes"),
}


@pytest.mark.parametrize("name", SPOILED)
def test_a_profile_of_something_else_is_refused(tmp_path: Path, name: str) -> None:
    spec = measured(tmp_path, (0.0, 1), (1.0, 1), (1.0, 1))
    tree = json.loads(spec.profile.read_text())
    spoil, words = SPOILED[name]
    spoil(tree)
    spec.profile.write_text(json.dumps(tree))
    with pytest.raises(HpcMpError, match=words):
        layout_of(spec, read_shape(spec))
    spec.profile.write_text("[")
    with pytest.raises(HpcMpError, match="is not JSON"):
        layout_of(spec, read_shape(spec))


def test_the_number_of_layers_does_not_matter_to_a_profile(tmp_path: Path) -> None:
    deep = measured(tmp_path, (0.0, 1), (1.0, 1), (1.0, 1), config={"num_hidden_layers": 80})
    shallow = spec_of(3, base=tmp_path, partition="profile")
    assert profile_of(shallow, read_shape(shallow)) == profile_of(deep, read_shape(deep))


# --- what tensor ranks cut, share and hold alike, and what is refused; without torch ---------------------------------


MODELS = table(__file__, "stages.toml", "models")


def spec(model: str, tensor: int, **more: object) -> JobSpec:
    return resolve({"job": {"ranks_per_node": tensor}, "model": {"config": MODELS[model]},
                    "data": {"files": ["x"], "sequence_length": 8}, "parallel": {"tensor": tensor, **more},
                    "train": {"steps": 1, "global_batch": 1}}, Path("/"))


def division(tensor: int, modules: tuple[str, ...] = ("*",)) -> Layout:
    return Layout(degrees=Degrees(tensor), tensor_modules=modules, shard_degree=2)


def model_of(model: str) -> tuple[models.Family, models.ModelShape]:
    return models.FAMILIES[model], read_shape(spec(model, 1))


@pytest.mark.parametrize("modules", [("*",), ("*.mlp", "lm_head"), ("*.attn", "*.self_attn")])
@pytest.mark.parametrize("tensor", range(1, 13))
@pytest.mark.parametrize("model", MODELS)
def test_first_replicas_hold_every_element_once(model: str, tensor: int, modules: tuple[str, ...]) -> None:
    family, shape = model_of(model)
    held: dict[str, int] = {}
    for rank in range(tensor):
        for unit in rank_units(division(tensor, modules), shape, stage_spans([shape.layers]), rank).values():
            for slot in unit.slots:
                held[slot.weight.name] = held.get(slot.weight.name, 0) + slot.size * slot.counts
                assert slot.copies == tensor if not slot.cut else slot.replica < slot.copies
    assert held == {weight.name: prod(weight.shape) for weight in family.all_weights(shape)}


@pytest.mark.parametrize("tied", [False, True])
def test_a_tied_head_is_cut_with_the_embedding(tied: bool) -> None:
    family = models.FAMILIES["gptj"]
    shape = family.read({"n_embd": 24, "n_head": 3, "n_layer": 1, "vocab_size": 5, "rotary_dim": 4, "tie_word_embeddings": tied})
    bias = next(weight for weight in family.head_weights(shape) if weight.name == "lm_head.bias")
    cuts = [part_of(family, shape, bias, TensorCut(2, 0, (module,))).cut for module in ("transformer.wte", "lm_head")]
    assert cuts == [tied, not tied]


@given(kv_heads=st.integers(1, 12), group=st.integers(1, 9), data=st.data())
def test_ranks_have_the_key_value_heads_that_their_query_heads_need(kv_heads: int, group: int, data: st.DataObject) -> None:
    ranks = data.draw(st.integers(1, kv_heads * group))
    every = [heads_of(kv_heads * group, kv_heads, ranks, rank) for rank in range(ranks)]
    assert [number for heads in every for number in heads.query] == [*range(kv_heads * group)]
    for rank, heads in enumerate(every):
        queries = Counter(number // group for number in heads.query)
        assert queries.keys() == {*heads.kv} and len({*queries.values()}) == 1, "attention functions take equal groups"
        first = rank - heads.replica
        assert [other for other in range(ranks) if {*every[other].kv} & {*heads.kv}] == [*range(first, first + heads.copies)]
    assert len(every[0].query) == max(len(heads.query) for heads in every)


def test_projections_without_heads_are_not_cut() -> None:
    family, shape = model_of("llama")
    odd = replace(family, block_weights=lambda shape, layer: column("self_attn.gate_proj", 2 * shape.heads - 1, shape.hidden))
    with pytest.raises(HpcMpError, match=r"tensor = 2: cuts heads, and .*gate_proj.weight of shape \(23, 24\) has none"):
        part_of(odd, shape, odd.layer_weights(shape, 0)[0], TensorCut(2))


def test_neighbours_share_a_key_value_head() -> None:
    _, shape = model_of("llama")
    held = []
    for rank in range(12):
        units = rank_units(division(12), shape, stage_spans([shape.layers]), rank)
        slot = next(s for s in units["model.layers.1"].slots if s.weight.name.endswith("k_proj.weight"))
        held.append((slot.box[0].start, slot.box[0].stop, slot.copies, slot.replica))
    assert held == [(rank // 2 * 2, rank // 2 * 2 + 2, 2, rank % 2) for rank in range(12)]


@pytest.mark.parametrize(("model", "tensor", "more", "said"), table(__file__, "stages.toml", "uncut"))
def test_what_cannot_be_cut_is_refused_with_the_arithmetic(model: str, tensor: int, more: dict[str, object], said: str) -> None:
    with pytest.raises(HpcMpError, match=said):
        check_job(spec(model, tensor, **more), read_shape(spec(model, 1)))


@pytest.mark.parametrize(("model", "tensor", "more"), table(__file__, "stages.toml", "cuts"))
def test_what_can_be_cut_is_not(model: str, tensor: int, more: dict[str, object]) -> None:
    check_job(spec(model, tensor, **more), read_shape(spec(model, 1)))


def test_all_that_ranks_hold_alike_is_listed_with_its_reason() -> None:
    family, shape = model_of("llama")
    assert left_whole(family, shape, TensorCut()) == ""
    assert left_whole(family, shape, TensorCut(12, 0, ("*.self_attn", "*.[02].mlp", "lm_head"))) == (
        "not among parallel.tensor_modules: model.embed_tokens, model.layers.1.mlp; "
        "a vector of hidden size: model.layers.*.input_layernorm, model.layers.*.post_attention_layernorm, model.norm; "
        "6 key-value heads on 12 ranks: model.layers.*.self_attn.k_proj, model.layers.*.self_attn.v_proj; "
        "added once, to the sum over the ranks: model.layers.0,2.mlp.down_proj.bias")
    assert "looked up by positions, not by tokens: transformer.wpe" in left_whole(*model_of("gpt2"), TensorCut(2))
