"""Adapters in files: checkpoints, PEFT's format both ways, and the merged model, in fp64 to 1e-12."""

import json
import shutil
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import peft
import pytest
import torch
from click.testing import CliRunner
from exact import EXACT, cases
from layouts import Result, job, layout, parameters, prepare, run_whole, start
from ranks import exit_codes, run_ranks
from safetensors.torch import load_file, save_file
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_shape
from hpc_mp.layout.models import family_of
from hpc_mp.layout.models.peft_files import CONFIG, WEIGHTS, config_document
from hpc_mp.rundir import RunDirectory, newest_complete
from hpc_mp.train.data import IGNORE, Samples, bpe
from hpc_mp.train.data import prepare as tokenized
from hpc_mp.train.device.precision import StaysDouble

TP2_PP2 = layout(2, 2, microbatches=3)
MODELS = ("llama", "gpt2", "mixtral")
TARGETS = {"llama": ["q_proj", "o_proj", "up_proj", "down_proj"], "gpt2": ["c_attn", "c_proj"], "mixtral": ["k_proj", "o_proj"]}
WHOLE = {"lora.rank": "3", "lora.alpha": "30.0"}
ADAPTED = [f"{key}={value}" for key, value in WHOLE.items()]


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` in a process of its own: this one forks ranks, which forbids it to compute."""
    return run_ranks(1, function, *args)[0]


def save_model(directory: Path, like: JobSpec) -> None:
    """Save a model with random weights."""
    values = dict(like.model.config or {})
    torch.manual_seed(3)
    AutoModelForCausalLM.from_config(AutoConfig.for_model(values.pop("model_type"), **values)).double().save_pretrained(directory)


@pytest.fixture(scope="module")
def base(place: Path, tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """``base(model)``: the directory of a model of transformers."""

    @cache
    def saved(model: str) -> Path:
        directory = tmp_path_factory.mktemp("base") / model
        apart(save_model, directory, job(place, model))
        made = bpe.train([place / "text.jsonl"], ["text"], vocabulary=read_shape(job(place, model)).vocabulary,
                         cache=directory.with_name("cache"))
        shutil.copy(made / "tokenizer.json", directory)
        return directory

    return saved


def tuned(place: Path, directory: Path, *more: str) -> JobSpec:
    """A job of three steps that trains adapters beside the weights in ``directory``."""
    path = place / f"lora-{directory.name}.toml"
    path.write_text(f'model.pretrained = "{directory}"\ndata = {{ files = ["text.jsonl"], sequence_length = 24 }}\n'
                    '[train]\nsteps = 3\nglobal_batch = 24\nprecision = "fp64"\nlearning_rate = 0.05\neps = 1e-2\n'
                    '[checkpoint]\nevery = 2\n[job]\nname = "tuned"\ndevice = "cpu"\n')
    return load_job(path, [*more])


@torch.no_grad()
def loss_of(model: torch.nn.Module, spec: JobSpec, step: int) -> float:
    """The loss of the global batch of a step (from 1), in one piece."""
    tokens = tokenized(
        find_files(spec.data.files), vocabulary=read_shape(spec).vocabulary, cache=Path(spec.job.directory) / ".cache",
        progress=lambda done, total: None, tokenizer_directory=None, pretrained=Path(spec.model.pretrained or ""))
    size = spec.train.global_batch
    batch = Samples(tokens, spec.data.sequence_length, spec.train.seed).batch(range((step - 1) * size, step * size))
    ids, labels = map(torch.from_numpy, batch)
    with StaysDouble():
        logits = model.eval()(ids).logits
    return torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), ignore_index=IGNORE).item()


def loaded(directory: Path) -> Any:
    return AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager", attn_implementation="eager")


def with_theirs(directory: Path, adapters: Path, spec: JobSpec, step: int) -> tuple[float, float]:
    """The losses by PEFT, as the adapters are and with one number changed."""
    model = peft.PeftModel.from_pretrained(loaded(directory), str(adapters))
    right = loss_of(model, spec, step)
    with torch.no_grad():
        next(values for name, values in model.named_parameters() if "lora_B" in name)[1, 1] += 1.0
    return right, loss_of(model, spec, step)


def exported(run: RunDirectory, output: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["export", str(run.path), "--output", str(output), "--json", "--step", "2", *options])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


@pytest.mark.parametrize("model", cases(MODELS, ("mixtral",)))
def test_peft_and_transformers_compute_the_loss_of_the_engine(place: Path, base: Callable[[str], Path], tmp_path: Path,
                                                              model: str) -> None:
    """The loss of the third step is that of the adapters after the second, trained on tp 2 × pp 2."""
    spec = tuned(place, base(model), *ADAPTED, *TP2_PP2)
    run = start(spec)
    loss = run_whole(spec, run=run).losses[2]
    assert apart(exported, run, tmp_path / "adapters", "--adapters")["files"] == [WEIGHTS]
    right, changed = apart(with_theirs, base(model), tmp_path / "adapters", spec, 3)
    assert abs(right - loss) < EXACT * right and abs(changed - loss) > 1e-6
    apart(exported, run, tmp_path / "merged")
    assert abs(apart(lambda: loss_of(loaded(tmp_path / "merged"), spec, 3)) - loss) < EXACT
    assert abs(apart(lambda: loss_of(loaded(base(model)), spec, 3)) - loss) > 1e-6, "without adapters it is another model"


def made_by_peft(directory: Path, output: Path, model: str) -> None:
    """Save adapters whose B is not zero."""
    experts = {"target_parameters": ["mlp.experts.gate_up_proj", "mlp.experts.down_proj"]} if model == "mixtral" else {}
    config = peft.LoraConfig(r=2, lora_alpha=5, use_rslora=True, target_modules=TARGETS[model], **experts)
    adapted = peft.get_peft_model(loaded(directory), config)
    torch.manual_seed(5)
    with torch.no_grad():
        for name, values in adapted.named_parameters():
            if "lora_B" in name:
                values.normal_(0.0, 0.3)
    adapted.save_pretrained(str(output))


@pytest.mark.parametrize("model", cases(MODELS, ("gpt2",)))
def test_training_begins_with_adapters_of_peft(place: Path, base: Callable[[str], Path], tmp_path: Path, model: str) -> None:
    """And a step that changes nothing writes the same ones."""
    adapters = tmp_path / "adapters"
    apart(made_by_peft, base(model), adapters, model)
    spec = tuned(place, base(model), f'lora.pretrained="{adapters}"', "train.learning_rate=0.0", *TP2_PP2)
    run = start(spec)
    loss = run_whole(spec, run=run).losses[0]
    right, changed = apart(with_theirs, base(model), adapters, spec, 1)
    assert abs(right - loss) < EXACT * right and abs(changed - loss) > 1e-6
    apart(exported, run, tmp_path / "again", "--adapters")
    assert apart(same_adapters, adapters, tmp_path / "again")
    one, other = (json.loads((directory / CONFIG).read_text()) for directory in (adapters, tmp_path / "again"))
    assert all(one[key] == other[key] for key in ("r", "lora_alpha", "use_rslora", "fan_in_fan_out"))
    assert all(sorted(one[key] or ()) == (other[key] or []) for key in ("target_modules", "target_parameters"))


def test_a_checkpoint_holds_adapters_alone_and_goes_on_elsewhere(place: Path, base: Callable[[str], Path]) -> None:
    spec = tuned(place, base("mixtral"), *ADAPTED, *layout(data=2, expert=2, zero=1), "train.steps=2")
    run = start(spec)
    run_whole(spec, run=run)
    checkpoint, _ = newest_complete(run.checkpoints)
    assert checkpoint is not None
    numbers = sum(values.numel() for values in parameters(spec, checkpoint).values())
    files = sum(path.stat().st_size for path in checkpoint.glob("*.safetensors"))
    assert 3 * 8 * numbers <= files < 3 * 8 * numbers + 60_000, "A, B and two numbers of state for each; and headers"

    def on(*where: str) -> Result:
        further = tuned(place, base("mixtral"), *ADAPTED, *where)
        prepare(further, run)
        return run_whole(further, run=run)

    whole = tuned(place, base("mixtral"), *ADAPTED)
    assert on(*layout(2, 2, microbatches=3)).distance(run_whole(whole)) < EXACT


def test_a_run_goes_on_with_the_same_adapters_only(place: Path, base: Callable[[str], Path]) -> None:
    run = start(tuned(place, base("llama"), *ADAPTED, "train.steps=2"))
    run_whole(load_job(run.job), run=run)
    prepare(tuned(place, base("llama"), "lora.rank=2"), run)
    assert exit_codes(1, run.job, lambda: None, timeout=100.0) != [0]
    assert "was trained with model.lora" in run.main_log.read_text()


def changed_config(adapters: Path, **settings: Any) -> None:
    config = json.loads((adapters / CONFIG).read_text())
    (adapters / CONFIG).write_text(json.dumps(config | settings))


def renamed(adapters: Path, change: Callable[[str], str]) -> None:
    save_file({change(name): values for name, values in load_file(adapters / WEIGHTS).items()}, adapters / WEIGHTS)


FAULTS: dict[str, tuple[Callable[[Path], object], str]] = {
    "DoRA": (lambda adapters: changed_config(adapters, use_dora=True), "has use_dora = true, which is not supported"),
    "several ranks": (lambda adapters: changed_config(adapters, rank_pattern={"q_proj": 4}), "has rank_pattern"),
    "biases": (lambda adapters: changed_config(adapters, bias="all"), "has bias"),
    "PiSSA": (lambda adapters: changed_config(adapters, init_lora_weights="pissa"), "is not one of plain LoRA"),
    "another rank": (lambda adapters: changed_config(adapters, r=4), "but the model requires plain numbers of shape (4,"),
    "another layer": (lambda adapters: renamed(adapters, lambda name: name.replace("layers.0", "layers.7")), "layers.7"),
    "the embedding": (lambda adapters: renamed(adapters, lambda name: name.replace("layers.0.self_attn.q_proj", "embed_tokens")),
                      "embed_tokens"),
    "no weights": (lambda adapters: (adapters / WEIGHTS).unlink(), f"holds no {WEIGHTS}"),
    "half a file": (lambda adapters: (adapters / WEIGHTS).write_bytes((adapters / WEIGHTS).read_bytes()[:-9]), "incomplete copy"),
}


def test_adapters_of_something_else_are_refused(place: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    apart(made_by_peft, base("llama"), tmp_path / "right", "llama")
    for number, (spoil, words) in enumerate(FAULTS.values()):
        adapters = tmp_path / f"{number}"
        shutil.copytree(tmp_path / "right", adapters)
        apart(lambda spoil, adapters: bool(spoil(adapters)), spoil, adapters)
        with pytest.raises(HpcMpError) as refused:
            read_shape(tuned(place, base("llama"), f'lora.pretrained="{adapters}"'))
        assert words in str(refused.value)


def test_dense_layers_between_experts_have_no_place_in_pefts_format(place: Path) -> None:
    spec = job(place, "qwen3_moe", ADAPTED)
    shape = read_shape(spec)
    with pytest.raises(HpcMpError, match=r"mlp\.gate_proj.*takes that name for the experts"):
        config_document(family_of(shape), shape, None)
    chosen = read_shape(job(place, "qwen3_moe", [*ADAPTED, 'lora.modules=["self_attn.*", "experts.*"]']))
    document = config_document(family_of(shape), chosen, None)
    assert document["target_modules"] == ["k_proj", "o_proj", "q_proj", "v_proj"]
    assert document["target_parameters"] == ["mlp.experts.down_proj", "mlp.experts.gate_up_proj"]


def same_adapters(one: Path, other: Path) -> bool:
    before, after = (load_file(directory / WEIGHTS) for directory in (one, other))
    return before.keys() == after.keys() and all(torch.equal(before[name], after[name]) for name in before)


def test_a_run_without_adapters_has_none_to_export(place: Path, base: Callable[[str], Path], tmp_path: Path) -> None:
    run = start(tuned(place, base("llama")))
    result = CliRunner().invoke(cli, ["export", str(run.path), "--output", str(tmp_path / "none"), "--adapters"])
    assert isinstance(result.exception, HpcMpError) and "trains all weights of its model" in str(result.exception)
