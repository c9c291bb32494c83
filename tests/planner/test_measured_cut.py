"""A measured model is cut evenly in time, and memory counts only as far as the fullest rank needs it to."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import measured_with, read_shape, stage_cut, undivided
from hpc_mp.launch.plan import stages_of
from hpc_mp.layout.model_profile import ModelProfile, UnitProfile, write_profile
from hpc_mp.planner.measured_cut import fullest

MIB = 1 << 20
# The head takes the time of four blocks, the embedding the activations of six.
UNITS = (UnitProfile(0.0, 600 * MIB, 0), (UnitProfile(1.0, 100 * MIB, 0),), UnitProfile(4.0, 0, 0))


def measured(base: Path, memory: int | None, **more: Any) -> JobSpec:
    degrees = {"pipeline": 3, "schedule": "gpipe", "microbatches": 2} | more
    ranks = degrees["pipeline"] * degrees.get("tensor", 1)
    spec = resolve({
        "job": {"ranks_per_node": ranks, "directory": "runs"}, "data": {"files": ["x"], "sequence_length": 32},
        "model": {"config": {"model_type": "llama", "num_hidden_layers": 12, "hidden_size": 64, "num_attention_heads": 4,
                             "num_key_value_heads": 4, "intermediate_size": 160, "vocab_size": 1024}},
        "train": {"steps": 1, "global_batch": 8}, "parallel": {"partition": "profile", **degrees}}, base)
    write_profile(spec.profile, ModelProfile("H100", 3, measured_with(spec, read_shape(spec)), *UNITS, memory))
    return spec


def held(layers: tuple[int, ...], profile: ModelProfile, spec: JobSpec) -> int:
    return fullest(replace(undivided(spec), layers=layers), read_shape(spec), profile)


def cut(spec: JobSpec) -> tuple[tuple[int, ...], str]:
    found = stages_of(spec, read_shape(spec))
    return found.layers, found.why


def test_a_rank_holds_its_state_and_the_activations_of_its_chunks(tmp_path: Path) -> None:
    """GPipe with two microbatches keeps both: of embedding and five blocks 1,100 MiB each."""
    spec, profile = measured(tmp_path, None), ModelProfile("H100", 3, {}, *UNITS)
    assert 2 * 1100 * MIB < held((5, 5, 2), profile, spec) < 2 * 1100 * MIB + 16 * MIB
    assert held((0, 6, 6), profile, spec) < 2 * 600 * MIB + 16 * MIB
    one = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"schedule": "1f1b"})})
    assert held((0, 0, 12), profile, one) < 1200 * MIB + 16 * MIB, "the last rank of 1F1B keeps one"


def test_activations_are_shared_by_tensor_ranks(tmp_path: Path) -> None:
    spec = measured(tmp_path, None, tensor=2)
    assert held((5, 5, 2), ModelProfile("H100", 3, {}, *UNITS), spec) < 1100 * MIB + 16 * MIB


@pytest.mark.parametrize("memory", [None, 3000 * MIB])
def test_time_alone_counts_where_memory_does_not_bind(tmp_path: Path, memory: int | None) -> None:
    layers, why = cut(measured(tmp_path, memory))
    assert layers == (5, 5, 2) and "the most even cut in measured time" in why and "memory_weight" not in why


def test_memory_counts_as_far_as_the_fullest_rank_needs_it_to(tmp_path: Path) -> None:
    spec = measured(tmp_path, 2000 * MIB)
    shape = read_shape(spec)
    layers, why = cut(spec)
    profile = ModelProfile("H100", 3, {}, *UNITS)
    assert held(layers, profile, spec) <= 2000 * MIB < held((5, 5, 2), profile, spec)
    assert layers == (3, 6, 3) and "measured time and memory" in why
    weight = float(why.partition("memory_weight ")[2].partition(";")[0])
    assert 0 < weight < 1
    less = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"memory_weight": round(weight - 0.1, 1)})})
    assert held(stage_cut(less, shape).layers, profile, spec) > 2000 * MIB, "no smaller weight does it"
    assert why.endswith("; with time alone a rank would need 2.15 GiB of the 1.95 GiB of a measured H100")


def test_where_nothing_fits_the_fullest_rank_holds_as_little_as_can_be_unless_the_job_has_a_weight(tmp_path: Path) -> None:
    layers, why = cut(measured(tmp_path, 500 * MIB))
    assert layers == (0, 6, 6) and "and it still needs 1.18 GiB" in why
    assert cut(measured(tmp_path, 500 * MIB, memory_weight=0.0))[0] == (5, 5, 2)


def test_a_profile_of_an_earlier_release_knows_no_memory(tmp_path: Path) -> None:
    spec = measured(tmp_path, 500 * MIB)
    tree = json.loads(spec.profile.read_text())
    assert tree.pop("memory") == 500 * MIB
    spec.profile.write_text(json.dumps(tree))
    assert cut(spec)[0] == (5, 5, 2)
