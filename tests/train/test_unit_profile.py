"""``hpc-mp train --profile`` measures what embedding, block and head take, and ``partition = "profile"`` cuts by it."""

import json
import time
from math import prod
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner
from layouts import job, layout

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.train import command
from hpc_mp.job import load_job
from hpc_mp.job.layout import layout_of, profile_of, read_shape
from hpc_mp.layout.flat import StageSpan, unit_weights
from hpc_mp.layout.model_profile import ModelProfile, UnitProfile
from hpc_mp.layout.models import family_of
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.rank.unit_profile import measure

# The layers of each model whose blocks are measured.
MODELS = {"gpt2": [0], "llama-tied": [0], "mixtral": [0], "gemma2": [0, 1], "qwen3_moe": [0, 1]}
CPU = 'job.device="cpu"'


def units(profile: ModelProfile) -> tuple[UnitProfile, ...]:
    return profile.embedding, *profile.blocks, profile.head


@pytest.mark.parametrize("model", MODELS)
def test_bytes_are_those_of_the_units(tmp_path: Path, model: str) -> None:
    def measured(*overrides: str) -> Any:
        spec = job(tmp_path, model, [CPU, *overrides])
        return measure(spec, read_shape(spec), 1)

    shape = read_shape(job(tmp_path, model))
    full, bf16 = measured('parallel.recompute="full"'), measured('train.precision="bf16"')
    spans = [StageSpan(range(0), True, False), *(StageSpan(range(layer, layer + 1), False, False) for layer in MODELS[model]),
             StageSpan(range(0), False, True)]
    for span, one, other in zip(spans, units(full), units(bf16), strict=True):
        weights = unit_weights(family_of(shape), shape, span).values()
        elements = sum(-(-sum(prod(weight.shape) for weight in unit) // 8) * 8 for unit in weights)
        assert (one.parameters, other.parameters) == (8 * elements, 2 * elements)
        assert one.seconds > 0
    tokens = 12 * 24  # of a microbatch: without a pipeline all 24 sequences fit into one, 8,192 tokens at most
    spec = job(tmp_path, model)
    assert {block.activations for block in full.blocks} == {spec.microbatch_size * 24 * shape.hidden * 8}, "the input of a block"
    assert full.head.activations == measured().head.activations > tokens * shape.vocabulary * 8 / 2


def test_seconds_are_those_of_the_unit_that_takes_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    forward = TransformersStage.block

    def slow(self: TransformersStage, *given: Any) -> Any:
        time.sleep(0.25)
        return forward(self, *given)

    monkeypatch.setattr(TransformersStage, "block", slow)
    spec = job(tmp_path, "llama", [CPU])
    found = measure(spec, read_shape(spec), 1)
    assert found.blocks[0].seconds > 0.25 > found.embedding.seconds + found.head.seconds


def test_a_profile_is_written_and_cuts_the_job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    job(tmp_path, "llama")
    path = str(tmp_path / "llama.toml")
    words = [word for each in (*layout(pipeline=3), "parallel.microbatches=4", 'parallel.partition="profile"')
             for word in ("--set", each)]
    shown = CliRunner().invoke(command, [path, "--profile", *words], catch_exceptions=False)
    assert shown.exit_code == 0 and "norm and head" in shown.output and "the most even cut in measured" in shown.output
    overrides = words[1::2]
    spec = load_job(Path(path), overrides)
    assert spec.profile == tmp_path / "runs/.cache/profile-exact.json"
    shape = read_shape(spec)
    found = profile_of(spec, shape)
    assert found.repetitions == 10 and found.device == "cpu" and found.measured["sequences of a microbatch"] == 6
    assert sum(layout_of(spec, shape).layers) == 5
    tree = json.loads(spec.profile.read_text())
    tree["head"]["seconds"] = 100 * tree["blocks"][0]["seconds"]
    spec.profile.write_text(json.dumps(tree))
    assert layout_of(load_job(Path(path), [*overrides, "parallel.memory_weight=0"]), shape).layers[-1] == 0
    other = load_job(Path(path), [*overrides, "parallel.microbatches=2"])
    with pytest.raises(HpcMpError, match="sequences of a microbatch = 6, but the job has 12"):
        layout_of(other, shape)
