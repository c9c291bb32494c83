"""A prediction for every type of model that the engine trains: a launch makes one, so that an exception would stop it."""

import math
from dataclasses import replace

import pytest
import read_types

from hpc_mp.base.assets import asset_table
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import FAMILIES, ModelShape, family_of
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.layout.placement import Degrees
from hpc_mp.planner.expectation import expect, machine_of
from hpc_mp.planner.frameworks import layer_weights

READ = [kind for kind in asset_table("env/model-types.toml")["verified"] if kind not in FAMILIES]
LAYOUTS = {
    "alone": Layout(degrees=Degrees(), samples=2, sequence=64, microbatches=1, layers=(4,), order="DPT", rank_map="block",
                    ranks_per_node=8, zero=0, shard_degree=1, precision="bf16"),
    "tensor, pipeline, data": Layout(
        degrees=Degrees(tensor=2, pipeline=2, data=2), samples=1, sequence=64, microbatches=4, layers=(2, 2), order="DPT",
        rank_map="block", ranks_per_node=8, zero=2, shard_degree=2, precision="bf16", recompute="full", sequence_parallel=True),
    "zero 3": Layout(degrees=Degrees(data=8), samples=1, sequence=64, microbatches=2, layers=(4,), order="DPT",
                     rank_map="block", ranks_per_node=8, zero=3, shard_degree=8, precision="fp32"),
}


def shape_of(kind: str) -> ModelShape:
    """Return the shape of a tiny model of a type, whose encoder gets 32 tokens if it has one."""
    config = read_types.tiny(kind)
    assert kind in FAMILIES or read_types.read(config) is None
    shape = model_shape(config, None)
    return replace(shape, prompt=32) if shape.encoder else shape


@pytest.mark.parametrize("kind", [*FAMILIES, *(pytest.param(kind, marks=pytest.mark.prove) for kind in READ)])
def test_every_type_has_a_prediction(kind: str) -> None:
    shape = shape_of(kind)
    for name, layout in LAYOUTS.items():
        if layout.stages > 1 and shape.layers != sum(layout.layers):
            continue
        cut = layout if layout.stages > 1 else replace(layout, layers=(shape.layers,))
        expected = expect(cut, shape, machine_of("h100", 8))
        figures = [expected.seconds, expected.tokens_per_s, expected.mfu, *expected.parts.values(),
                   *(size for rank in expected.needs for size in rank.values())]
        assert all(math.isfinite(figure) and figure >= 0 for figure in figures), name
        assert expected.seconds > 0 and expected.mfu > 0 and len(expected.needs) == layout.degrees.pipeline, name


@pytest.mark.parametrize("kind", ["llama", "gpt2", "mixtral", "qwen3_moe", "deepseek_v3", "gpt_oss", "t5"])
def test_weights_of_a_layer_are_those_of_its_matrices(kind: str) -> None:
    """Of DeepSeek-V3 with latent attention and a shared expert too, by hand from the configuration's sizes."""
    shape = shape_of(kind)
    weights = layer_weights(shape)
    for layer in range(shape.layers):
        matrices = [weight for weight in family_of(shape).block_weights(shape, layer) if len(weight.shape) > 1]
        assert sum(weights[layer]) <= sum(math.prod(weight.shape) for weight in matrices)
        assert bool(weights[layer][1]) == bool(shape.experts_of(layer))
    if kind == "deepseek_v3":
        attention = 8 * 32 + 48 * 8 + 12 * 32 + 64 * 8 + 32 * 32
        assert weights[0] == (attention + 3 * 48 * 32, 0)
        assert weights[2] == (attention + 4 * 32 + 3 * 16 * 32, 4 * 3 * 16 * 32)
