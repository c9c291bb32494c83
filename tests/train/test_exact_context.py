"""Ranks that share the tokens of every sample equal one process of plain transformers, in fp64 to 1e-12."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, MIXTRAL, Engine, Launched, Reference, cases
from layouts import job, layout, run_whole
from planting import wrapped

from hpc_mp.train.engine import context, ring_attention
from hpc_mp.train.engine.groups import Axis

CHOSEN = [(f"{model} with {kind}", name) for model in (LLAMA, "qwen2", MIXTRAL) for kind in ("longrope", "dynamic", "yarn")
          for name in ("cp2 ring", "cp2 ulysses", "pp2 1f1b M3", "pp2 cp2 ring zero_bubble", "dp2 cp2 zero3")]
QUICK = {("llama with longrope", "cp2 ring"), ("qwen2 with longrope", "cp2 ulysses"), ("mixtral with longrope", "cp2 ring"),
         ("llama with dynamic", "cp2 ulysses")}


@pytest.mark.parametrize(("model", "name"), cases(CHOSEN, QUICK))
def test_frequencies_are_those_of_whole_samples(engine: Engine, reference: Reference, model: str, name: str) -> None:
    """The same on every rank, whichever positions are its own."""
    assert engine(model, *LAYOUTS[name]).distance(reference(model)) < EXACT


few_queries = wrapped(ring_attention, "QUERIES", lambda queries: 5)  # a chunk has several stretches, the last of them shorter


@pytest.mark.parametrize("overrides", [
    pytest.param((), id="plain"), pytest.param(("train.dropout=0.2",), id="dropout", marks=pytest.mark.prove)])
def test_queries_in_several_stretches(place: Path, engine: Engine, overrides: tuple[str, ...]) -> None:
    one = engine(LLAMA, *overrides)
    assert run_engine(job(place, LLAMA, [*overrides, *LAYOUTS["cp2 ring"]]), before=few_queries).distance(one) < EXACT


def test_a_checkpoint_goes_on_with_other_context_ranks(place: Path, engine: Engine, launched: Launched) -> None:
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
