"""``hpc-mp export`` and the way back: what the engine trains is what plain transformers computes, and the reverse."""

import json
import logging
import resource
import shutil
from collections.abc import Callable
from contextlib import nullcontext
from functools import cache
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch
from click.testing import CliRunner
from exact import cases
from layouts import MODELS, job, run_whole, start, trained_run, write_text
from ranks import run_ranks
from safetensors import safe_open
from token_files import words
from tokenizers import Tokenizer
from transformers import AutoConfig, AutoModel, AutoModelForCausalLM, AutoTokenizer, PreTrainedTokenizerFast

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_shape
from hpc_mp.rundir import RunDirectory, newest_complete, read_lines
from hpc_mp.train.checkpoint.export import export
from hpc_mp.train.data import IGNORE, Samples, bpe, prepare
from hpc_mp.train.device.precision import StaysDouble

TP2_PP2 = ["job.ranks_per_node=4", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=3"]
FIRST = ("gpt2", "llama", "llama-tied", "mixtral")  # whose exports `make test` computes with; the others are proofs
TOLERANCE = {"fp32": 1e-6, "fp64": 1e-12}

Trained = tuple[JobSpec, RunDirectory]


@pytest.mark.parametrize("kept", [True, False], ids=["with its cache", "without its cache"])
def test_an_older_run_goes_on_with_the_tokenizer_that_it_trained(tmp_path: Path, kept: bool) -> None:
    """Before families had rules of splitting a Qwen2 run trained one with GPT-2's, under a name that says nothing of it."""
    write_text(tmp_path)
    run = trained_run(job(tmp_path, "qwen2", ["train.steps=1"]), bpe.SPLITS.clear)
    tokenizer = Path(run.tokenizer.read_text())
    assert '"Split"' not in (tokenizer / "tokenizer.json").read_text()
    if not kept:
        shutil.rmtree(run.cache)
    spec = job(tmp_path, "qwen2", ["train.steps=2"])
    run.job.write_text(dump_job(spec))
    assert len(run_whole(spec, run=run).losses) == 2
    assert Path(run.tokenizer.read_text()) == tokenizer and tokenizer.is_dir()
    with pytest.raises(HpcMpError) as refused:
        export(run, tmp_path / "model")
    assert "beside a qwen2 model" in refused.value.rule and f"move {tokenizer} elsewhere" in refused.value.remedy.lower()
    theirs = PreTrainedTokenizerFast.from_pretrained(tokenizer)
    text = find_files(spec.data.files)[0].read_text()
    own = Tokenizer.from_file(str(tokenizer / "tokenizer.json"))
    assert theirs(text, add_special_tokens=False)["input_ids"] == own.encode(text, add_special_tokens=False).ids
    tokenizer.rename(tmp_path / "elsewhere")
    assert export(run, tmp_path / "model").tokenizer is None
    assert '"Split"' in (Path(trained_run(spec).tokenizer.read_text()) / "tokenizer.json").read_text()


@pytest.fixture(scope="module")
def trained(place: Path) -> Callable[..., Trained]:
    """Three steps on tp 2 x pp 2, checkpoints of the steps 2 and 3: the third loss is that of the second's model."""

    @cache
    def train(model: str, precision: str, *more: str) -> Trained:
        spec = job(place, model, [*TP2_PP2, f'train.precision="{precision}"', "checkpoint.every=2", *more])
        return spec, trained_run(spec)

    return train


def apart(function: Callable[..., Any], *args: Any) -> Any:
    """``function`` in a process of its own: this one forks ranks, which forbids it to compute."""
    return run_ranks(1, function, *args)[0]


def exported(run: RunDirectory, output: Path, *options: str) -> dict[str, Any]:
    result = CliRunner().invoke(cli, ["export", str(run.path), "--output", str(output), "--json", *options])
    assert result.exit_code == 0, result.output
    document: dict[str, Any] = json.loads(result.stdout)
    return document


def loaded(directory: Path) -> torch.nn.Module:
    """Plain transformers, which must neither miss nor invent a weight, nor warn of anything."""
    warned: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: warned.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("transformers").addHandler(handler)
    model, info = AutoModelForCausalLM.from_pretrained(
        directory, output_loading_info=True, experts_implementation="eager")  # the others know no fp64
    assert not any(info.values()), info
    assert warned == []
    return model


@torch.no_grad()
def plain_loss(model: torch.nn.Module, spec: JobSpec, step: int) -> float:
    """Of the global batch of a step (from 1), in one piece."""
    tokens = prepare(
        find_files(spec.data.files), vocabulary=read_shape(spec).vocabulary, cache=Path(spec.job.directory) / ".cache",
        progress=lambda done, total: None, tokenizer_directory=None,
        pretrained=Path(spec.model.pretrained) if spec.model.pretrained else None)
    size = spec.train.global_batch
    batch = Samples(tokens, spec.data.sequence_length, spec.train.seed).batch(range((step - 1) * size, step * size))
    ids, labels = map(torch.from_numpy, batch)
    return torch.nn.functional.cross_entropy(
        model(ids).logits.flatten(0, 1).double(), labels.flatten(), ignore_index=IGNORE).item()


@torch.no_grad()
def losses_of(directory: Path, spec: JobSpec, step: int = 1) -> tuple[float, float]:
    """By plain transformers: as the model is, and with one number in its middle changed."""
    with StaysDouble() if spec.train.precision == "fp64" else nullcontext():
        model = AutoModelForCausalLM.from_pretrained(directory, experts_implementation="eager")
        right = plain_loss(model, spec, step)
        ends = ("mlp.c_proj.weight", "mlp.down_proj.weight", "mlp.fc_out.weight", "mlp.experts.down_proj")
        next(weight for name, weight in model.named_parameters() if name.endswith(ends))[3, 5] += 1.0
        return right, plain_loss(model, spec, step)


def check_loss(loss: float, directory: Path, spec: JobSpec, step: int = 1) -> None:
    """Compare the engine's loss with that of plain transformers for a model directory; a changed number must be seen."""
    right, perturbed = apart(losses_of, directory, spec, step)
    tolerance = TOLERANCE[spec.train.precision]
    assert abs(right - loss) < tolerance < abs(perturbed - loss), f"engine {loss!r}, plain {right!r}, perturbed {perturbed!r}"


# --- out -------------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("model", "precision"), cases(product(sorted(MODELS), TOLERANCE), {
    *((model, "fp64") for model in FIRST), ("gpt2", "fp32")}))
def test_plain_transformers_computes_the_loss_of_the_engine(trained: Callable[..., Trained], tmp_path: Path, model: str,
                                                            precision: str) -> None:
    spec, run = trained(model, precision)
    document = apart(exported, run, tmp_path / "model", "--step", "2")
    assert (document["step"], document["dtype"]) == (2, {"fp32": "float32", "fp64": "float64"}[precision])
    apart(lambda: bool(loaded(tmp_path / "model")))
    check_loss(read_lines(run.metrics)[2]["loss"], tmp_path / "model", spec, 3)


@pytest.mark.parametrize("model", sorted(MODELS))
def test_a_tied_head_is_not_written_twice(trained: Callable[..., Trained], tmp_path: Path, model: str) -> None:
    spec, run = trained(model, "fp64")

    def names() -> list[str]:
        assert exported(run, tmp_path / "model")["files"] == ["model.safetensors"]
        with safe_open(tmp_path / "model" / "model.safetensors", "pt") as file:
            assert file.metadata() == {"format": "pt"}
            return list(file.keys())

    found = apart(names)
    assert ("lm_head.weight" in found) != read_shape(spec).tied
    assert not any(name.startswith("optimizer") for name in found)


def test_the_tokenizer_goes_along_and_generates(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("llama", "fp64")

    def generate() -> tuple[str, str]:
        assert exported(run, tmp_path / "model")["tokenizer"]
        model, tokenizer = loaded(tmp_path / "model"), AutoTokenizer.from_pretrained(tmp_path / "model")
        assert model.generation_config.eos_token_id == model.config.eos_token_id == tokenizer.eos_token_id is not None
        prompt = tokenizer("def decode(s):\n    é", return_tensors="pt")
        made = model.generate(**prompt, max_new_tokens=8, do_sample=False, pad_token_id=tokenizer.eos_token_id)
        assert made.shape[1] > prompt["input_ids"].shape[1]
        return tokenizer.decode(prompt["input_ids"][0]), tokenizer.decode(made[0])

    prompt, whole = apart(generate)
    assert prompt == "def decode(s):\n    é"
    assert whole.startswith(prompt)


def test_several_files_hold_what_one_holds(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("gpt2", "fp32")

    def compare() -> None:
        one = export(run, tmp_path / "one")
        told: list[tuple[int, int]] = []
        many = export(run, tmp_path / "many", file_bytes=20_000, progress=lambda *bytes: told.append(bytes))
        assert len(many.files) > 3
        assert told[-1] == (many.bytes, one.bytes)
        index = json.loads((tmp_path / "many" / "model.safetensors.index.json").read_text())
        assert set(index["weight_map"].values()) == set(many.files)
        a, b = (loaded(tmp_path / name).state_dict() for name in ("one", "many"))
        assert a.keys() == b.keys()
        assert all(torch.equal(a[name], b[name]) for name in a)
        assert sum(p.numel() for name, p in a.items() if name != "lm_head.weight") == one.parameters

    apart(compare)


def test_the_dtype_can_be_chosen(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("llama-tied", "fp64")

    def compare() -> None:
        exported(run, tmp_path / "keep")
        exported(run, tmp_path / "half", "--dtype", "bfloat16")
        a, b = loaded(tmp_path / "keep"), loaded(tmp_path / "half")
        assert (a.dtype, b.dtype) == (torch.float64, torch.bfloat16)
        assert all(torch.equal(p.bfloat16(), q) for p, q in zip(a.parameters(), b.parameters(), strict=True))

    apart(compare)


def test_the_dropout_of_training_is_not_the_models(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("gpt2", "fp32", "train.dropout=0.25", "model.config.attn_pdrop=0.125")
    apart(exported, run, tmp_path / "model")
    config = json.loads((tmp_path / "model" / "config.json").read_text())
    assert [config[key] for key in ("attn_pdrop", "resid_pdrop", "embd_pdrop")] == [0.125, 0.0, 0.0]
    assert config["architectures"] == ["GPT2LMHeadModel"]
    assert config["dtype"] == "float32"


# --- refusals --------------------------------------------------------------------------------------------------------


def refused(run: RunDirectory, output: Path, **options: Any) -> str:
    """The message; nothing new may lie beside the output."""
    before = sorted(output.parent.iterdir())
    with pytest.raises(HpcMpError) as raised:
        export(run, output, **options)
    assert sorted(output.parent.iterdir()) == before
    return str(raised.value)


def test_only_a_model_directory_is_replaced_and_only_if_told(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("gpt2", "fp32")
    for name in ("empty", "model", "photos", "parent"):
        (tmp_path / name).mkdir()
    for name in ("model/config.json", "photos/a.jpg", "parent/config.json"):
        (tmp_path / name).write_text("mine")
    (tmp_path / "parent" / "below").mkdir()
    (tmp_path / "file").write_text("mine")

    def attempts() -> None:
        assert "is a file" in refused(run, tmp_path / "file", force=True)
        assert "is not empty" in refused(run, tmp_path / "model")
        assert "is no model directory" in refused(run, tmp_path / "photos", force=True)
        assert "is no model directory" in refused(run, tmp_path / "parent", force=True)
        export(run, tmp_path / "empty")
        export(run, tmp_path / "model", force=True)

    apart(attempts)
    assert (tmp_path / "photos/a.jpg").read_text() == (tmp_path / "parent/config.json").read_text() == "mine"
    assert (tmp_path / "file").read_text() == "mine"
    names = {"config.json", "generation_config.json", "model.safetensors", "tokenizer.json", "tokenizer_config.json"}
    assert {path.name for path in (tmp_path / "empty").iterdir()} >= names
    assert {path.name for path in (tmp_path / "model").iterdir()} >= names
    assert sorted(path.name for path in tmp_path.iterdir()) == ["empty", "file", "model", "parent", "photos"]


def test_nothing_is_left_when_the_disk_is_full(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("gpt2", "fp32")

    def attempt() -> None:
        resource.setrlimit(resource.RLIMIT_FSIZE, (50_000, 50_000))  # a write beyond it fails, as on a full disk
        assert "cannot be written" in refused(run, tmp_path / "model")

    apart(attempt)
    assert list(tmp_path.iterdir()) == []


def test_a_damaged_checkpoint_is_passed_over_by_name(place: Path, tmp_path: Path) -> None:
    run = trained_run(job(place, "llama", ["checkpoint.every=2"]))
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None
    (victim,) = newest.glob("*.safetensors")
    content = victim.read_bytes()
    victim.write_bytes(content[:-1] + bytes([content[-1] ^ 1]))

    def attempts() -> None:
        document = exported(run, tmp_path / "model")
        assert document["step"] == 2
        assert [Path(skip["checkpoint"]).name for skip in document["skipped"]] == [newest.name]
        assert victim.name in document["skipped"][0]["reason"]
        assert victim.name in refused(run, tmp_path / "other", step=3)
        assert "Choose from the steps 2, 3" in refused(run, tmp_path / "other", step=7)
        (run.checkpoints / "step-00000002" / "complete.json").unlink()
        message = refused(run, tmp_path / "other")
        for part in ("has no complete checkpoint", victim.name, "complete.json is missing"):
            assert part in message

    apart(attempts)


# --- what the run lacks or has besides -------------------------------------------------------------------------------


def test_a_moved_run_keeps_its_tokenizer_and_one_without_says_so(trained: Callable[..., Trained], tmp_path: Path) -> None:
    _, run = trained("gpt2", "fp32")
    moved = tmp_path / "moved"
    shutil.copytree(run.path, moved / "exact" / "0001")
    cache = Path((run.path / "tokenizer.path").read_text())
    shutil.copytree(cache, moved / ".cache" / cache.name)
    here = RunDirectory(moved / "exact" / "0001")
    (here.path / "tokenizer.path").write_text(f"/no/such/cache/{cache.name}")

    def attempts() -> None:
        assert exported(here, tmp_path / "with")["tokenizer"] == str(moved / ".cache" / cache.name)
        shutil.rmtree(moved / ".cache")
        result = CliRunner().invoke(cli, ["export", str(here.path), "--output", str(tmp_path / "without")])
        assert result.exit_code == 0
        assert "warning: the run's tokenizer is missing" in result.stderr

    apart(attempts)
    assert (tmp_path / "with" / "tokenizer.json").exists()
    assert not (tmp_path / "without" / "tokenizer.json").exists()


# --- and back --------------------------------------------------------------------------------------------------------


def continued(place: Path, directory: Path, *more: str) -> JobSpec:
    """One step of a job that begins with the weights in ``directory``."""
    path = place / f"{directory.name}.toml"
    path.write_text(f'model.pretrained = "{directory}"\ndata = {{ files = ["text.jsonl"], sequence_length = 24 }}\n'
                    '[train]\nsteps = 1\nglobal_batch = 24\nprecision = "fp64"\n[job]\nname = "back"\n')
    return load_job(path, [*TP2_PP2, *more])


@pytest.mark.parametrize("model", cases(sorted(MODELS), FIRST))
def test_a_job_goes_on_with_what_was_exported(place: Path, trained: Callable[..., Trained], tmp_path: Path, model: str) -> None:
    _, run = trained(model, "fp64")
    first, second = tmp_path / model, tmp_path / "second"
    apart(exported, run, first)
    (first / "generation_config.json").write_text('{"temperature": 0.5}')
    spec = continued(place, first)
    again = start(spec)
    check_loss(run_whole(spec, run=again).losses[0], first, spec)
    apart(exported, again, second)
    assert (second / "generation_config.json").read_text() == '{"temperature": 0.5}'
    assert (second / "tokenizer.json").read_bytes() == (first / "tokenizer.json").read_bytes()


@pytest.mark.parametrize("model", cases(sorted(MODELS), ("gptj", "mixtral")))
def test_what_is_read_is_what_is_exported(place: Path, tmp_path: Path, model: str) -> None:
    """To the last bit, through a step that changes nothing."""
    directory, again = tmp_path / model, tmp_path / "again"
    apart(save_random, directory, job(place, model), AutoModelForCausalLM, "5GB")
    spec = continued(place, directory, "train.learning_rate=0.0", f'data.tokenizer="{words(tmp_path / "words", ["?", "a"])}"')
    run = trained_run(spec)
    if model == "qwen2":  # beside it transformers would split text by another rule, so it is exported without a tokenizer
        shutil.rmtree(run.tokenizer.read_text())

    def compare() -> None:
        exported(run, again)
        one, other = loaded(directory), loaded(again)
        found = dict(other.named_parameters())
        assert all(torch.equal(parameter, found.pop(name)) for name, parameter in one.named_parameters())
        assert found == {}
        ids = torch.arange(24).unsqueeze(0)
        assert torch.equal(one.eval()(ids).logits, other.eval()(ids).logits)
        with safe_open(directory / "model.safetensors", "pt") as a, safe_open(again / "model.safetensors", "pt") as b:
            assert {name: a.get_slice(name).get_shape() for name in a.keys()} == {  # noqa: SIM118
                name: b.get_slice(name).get_shape() for name in b.keys()}  # noqa: SIM118

    apart(compare)


SAVED = [*product(sorted(MODELS), ("5GB", "20KB"), (AutoModelForCausalLM,)), ("gpt2", "5GB", AutoModel)]


@pytest.mark.parametrize(("model", "size", "kind"), cases(SAVED, [case for case in SAVED if case[2] is AutoModel or (
    case[1] == "20KB") == (case[0] in ("llama", "mixtral"))]))
def test_a_job_begins_with_what_save_pretrained_wrote(place: Path, tmp_path: Path, model: str, size: str, kind: type) -> None:
    """Also with names without ``transformer.``, as the first GPT-2 checkpoints were saved."""
    directory = tmp_path / f"{model}-{size}-{kind.__name__}"
    assert (apart(save_random, directory, job(place, model), kind, size) > 1) == (size == "20KB")
    spec = continued(place, directory)
    made = bpe.train([place / "text.jsonl"], ["text"], vocabulary=read_shape(spec).vocabulary, cache=tmp_path / "cache")
    shutil.copy(made / "tokenizer.json", directory)
    check_loss(run_whole(spec).losses[0], directory, spec)


def save_random(directory: Path, like: JobSpec, kind: type, size: str) -> int:
    """Save random weights with transformers' own means; returns the number of files."""
    values = dict(like.model.config or {})
    torch.manual_seed(3)
    model = kind.from_config(AutoConfig.for_model(values.pop("model_type"), **values))
    model.double().save_pretrained(directory, max_shard_size=size)
    return len(list(directory.glob("*.safetensors")))
