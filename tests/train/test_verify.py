"""``hpc-mp verify`` passes models on layouts as they are, and refuses each planted fault with the module that it is in."""

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import read_types
import torch
from exact import LAYOUTS, cases
from layouts import JOB, layout, write_text
from planting import planted, wrapped
from ranks import run_ranks
from tables import table

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, load_job
from hpc_mp.layout.models import FAMILIES, Family
from hpc_mp.train.checkpoint import adapters
from hpc_mp.train.model import build_stage, transformers_stage
from hpc_mp.train.model.encoder_decoder import EncoderDecoderStage
from hpc_mp.train.model.vocabulary import SampleClass
from hpc_mp.train.parallel import dropout, gradients, projection
from hpc_mp.train.verify.verify import verify

Job = Callable[..., JobSpec]  # (model, *overrides)

MODELS: dict[str, str] = table(__file__, "verify.toml", "models")
MORE = {"tp2 pp2": layout(2, 2, microbatches=4), "documents": ['data.documents="separate"'],
        "dropout": ["train.dropout=0.1", *layout(2)], "lora": ["lora.rank=2", "lora.alpha=8.0", "lora.dropout=0.1", *layout(2)],
        "one": [], "no dropout": ["train.dropout=0.0"],
        "tp4 pp4 dp2": [*layout(4, 4, 2, zero=1, schedule='"interleaved_1f1b"', virtual_stages=2, microbatches=4)]}
PAIRS = ['data.format="prompt"', "data.prompt_length=9"]
MORE |= {f"pairs {name}": [*PAIRS, *(MORE | LAYOUTS)[name]] for name in ("tp2 pp2", "dp2 zero3", "tp4 pp4 dp2")}
HEALTHY: list[tuple[str, str]] = [tuple(pair) for pair in table(__file__, "verify.toml", "healthy")]
QUICK = {("gpt2", "tp2 pp2"), ("gemma2", "documents")}


@pytest.fixture(scope="module")
def job(tmp_path_factory: pytest.TempPathFactory) -> Job:
    place = tmp_path_factory.mktemp("verify")
    write_text(place)

    def load(model: str, *overrides: str) -> JobSpec:
        path = place / f"{model}.toml"
        path.write_text(JOB.format(model=MODELS[model]))
        spec = load_job(path, overrides)
        config = dict(spec.model.config or {})
        if config["model_type"] not in FAMILIES:
            assert (refusal := read_types.read(config)) is None, refusal
        return spec

    return load


def refusal(spec: JobSpec, before: Callable[[], None] = lambda: None) -> str:
    """Return why a job is refused, in a process of its own; empty if it is not. ``before``: called in it first."""

    def verified() -> str:
        before()
        try:
            verify(spec)
        except HpcMpError as error:
            return error.rule
        return ""

    result: str = run_ranks(1, verified, timeout=300.0)[0]
    return result


@pytest.mark.parametrize(("model", "name"), cases(HEALTHY, QUICK))
def test_what_is_equal_passes(job: Job, model: str, name: str) -> None:
    assert refusal(job(model, *(MORE | LAYOUTS)[name])) == ""


CLASSES = ('train.objective="classification"', 'data.labels=["a", "b", "c"]')
CLASSIFIERS = [("bert", "one"), ("bert", "lora"), ("bert", "dropout"), ("bert", "sp2 dp2 zero3"), ("llama", "tp2 pp2"),
               ("gpt2", "lora"), ("mistral", "dropout"),
               *((model, name) for model in ("roberta", "modernbert") for name in ("one", "lora", "dropout", "sp2 dp2 zero3"))]


@pytest.mark.parametrize(("model", "name"), cases(CLASSIFIERS, {("bert", "one")}))
def test_a_classification_that_is_equal_passes(job: Job, model: str, name: str) -> None:
    assert refusal(job(model, *CLASSES, *(MORE | LAYOUTS)[name])) == ""


@pytest.mark.prove
@pytest.mark.parametrize("model", ["bert", "roberta", "llama"])
def test_a_classification_by_another_token_is_refused(job: Job, model: str) -> None:
    @planted(SampleClass, "forward")
    def another(right: Any, objective: SampleClass, hidden: torch.Tensor, *rest: Any) -> Any:
        return right(objective, hidden.roll(1, 1), *rest)

    assert "the loss differs" in refusal(job(model, *CLASSES), another)


LEFT_OUT = "gives each rank only some of the tokens|which would mix documents|its own code drops elements"
READ = [kind for kind in asset_table("env/model-types.toml")["verified"] if kind not in FAMILIES]


@pytest.mark.prove
@pytest.mark.parametrize("kind", READ)
def test_every_type_that_is_read_passes_with_dropout_and_documents(tmp_path: Path, kind: str) -> None:
    """And is exported with the names that transformers stores. What a type cannot do is refused."""
    write_text(tmp_path)
    path = read_types.write_job(tmp_path, read_types.tiny(kind), JOB)
    passed = 0
    for name in ("tp2 pp2", "documents", "sp2 dp2 zero3"):
        for probability in ("0.1", "0.0"):
            result = refusal(load_job(path, [*(MORE | LAYOUTS)[name], f"train.dropout={probability}"]))
            assert result == "" or re.search(LEFT_OUT, result), (name, probability, result)
            passed += result == ""
    assert passed


# --- planted faults --------------------------------------------------------------------------------------------------


def of_attentions(change: Callable[[Any], None], layer: int = 1) -> Callable[[], None]:
    """Change the attention of a layer, once it has been attached."""

    @planted(build_stage, "_attention")
    def attached(right: Any, stage: Any, model: Any, whole: Any) -> None:
        right(stage, model, whole)
        for block, number in zip(stage.blocks, stage.span.layers, strict=True):
            if number == layer:
                change(stage.get_submodule(f"{block}.{model.family.attention}"))

    return attached


def acausal(attention: Any) -> None:
    attention.is_causal = False


def doubled_scale(attention: Any) -> None:
    attention.scaling *= 2


def more_heads(attention: Any) -> None:
    attention.head_dim //= 2


no_cap = wrapped(dropout, "capped", lambda capped: lambda scores, cap: scores)
window_off_by_one = wrapped(transformers_stage, "first_seen", lambda right: lambda begins, window, positions: right(
    begins, window and window + 1, positions))
documents_seen = wrapped(transformers_stage, "first_seen", lambda right: lambda begins, window, positions: right(
    None, window, positions))
unscaled_embedding = wrapped(build_stage, "embedding_scale", lambda right: lambda embedding: (1.0, False))
unsummed = wrapped(projection.TensorAxis, "_input_gradient", lambda right: lambda axis, gradient: gradient)


@planted(projection.Projection, "__init__")
def no_bias(right: Any, module: projection.Projection, weight: str, bias: str | None, *more: Any, **named: Any) -> None:
    right(module, weight, None if weight.endswith("h.1.mlp.c_fc.weight") else bias, *more, **named)


@planted(gradients.Sink, "add_product")
def doubled_gradient(right: Any, sink: gradients.Sink, left: torch.Tensor, *more: Any) -> None:
    right(sink, left * 2 if sink.slot.weight.name.endswith("layers.1.mlp.up_proj.weight") else left, *more)


@planted(transformers_stage.TransformersStage, "_embed")
def positions_twice(right: Any, stage: Any, batch: Any) -> torch.Tensor:
    hidden: torch.Tensor = right(stage, batch)
    return hidden + stage.get_submodule("transformer.wpe")(stage.positions)


@planted(adapters, "stored_names")
def adapters_of_another_layer(right: Any, *given: Any) -> dict[str, str]:
    names = right(*given)
    return {name: stored.replace(".0.", ".x.").replace(".1.", ".0.").replace(".x.", ".1.") for name, stored in names.items()}


FAULTS: dict[str, tuple[str, str, Callable[[], None], str]] = {
    "mask": ("llama", "tp2 pp2", of_attentions(acausal), "model.layers.1.self_attn: its output"),
    "scale of scores": ("llama", "one", of_attentions(doubled_scale), "model.layers.1.self_attn: its output"),
    "cap": ("gemma2", "one", no_cap, "model.layers.0.self_attn: its output"),
    "bias": ("gpt2", "one", no_bias, "transformer.h.1.mlp: its output"),
    "window": ("mistral", "one", window_off_by_one, "model.layers.0.self_attn: its output"),
    "doubled gradient": ("llama", "tp2 pp2", doubled_gradient, "model.layers.1.mlp.up_proj.weight: its gradient"),
    "heads": ("gpt2", "no dropout", of_attentions(more_heads), "transformer.h.1.attn: its output"),
    "documents": ("llama", "documents", documents_seen, "model.layers.0.self_attn: its output"),
    "positions": ("gpt2", "one", positions_twice, "the input of transformer.h.0: its output"),
    "adapters": ("llama", "lora", adapters_of_another_layer, "base_model.model.model.layers.0.mlp.down_proj"),
    "factor of the embedding": ("gemma", "one", unscaled_embedding, "model.embed_tokens: its output"),
    "dropout of attention weights": ("gpt_bigcode", "one", wrapped(
        Family, "attention_probability", lambda right: lambda family, config: 0.0), "transformer.h.0.attn: its output"),
    "table of positions": ("t5", "pairs tp2 pp2", wrapped(
        EncoderDecoderStage, "_score_biases", lambda right: lambda stage, *given: {
            name: bias * 1.01 for name, bias in right(stage, *given).items()}),
        "encoder.block.0.layer.0.SelfAttention: its output"),
    "sum of gradients": ("llama", "tp2 pp2", unsummed, "model.norm.weight: its gradient"),
}


@pytest.mark.parametrize("fault", cases(FAULTS, {"mask", "doubled gradient", "adapters"}))
def test_a_fault_is_refused_with_its_module(job: Job, fault: str) -> None:
    model, name, plant, module = FAULTS[fault]
    assert module in refusal(job(model, *(MORE | LAYOUTS)[name]), plant)
