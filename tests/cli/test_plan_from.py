"""``hpc-mp plan --from``: other frameworks' configurations are planned like the same jobs written here, and improved."""

import json
import re
from collections.abc import Mapping
from dataclasses import asdict
from pathlib import Path
from typing import Any

import pytest
import yaml
from click.testing import CliRunner, Result
from tables import read

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.job import load_job, resolve
from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.layout.layout import Layout
from hpc_mp.planner.foreign import read_foreign
from hpc_mp.planner.frameworks import FRAMEWORKS, Framework, footprint_elsewhere
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.step import step_time

PLANNER = Path(__file__).parents[1] / "planner"
TABLES = read(PLANNER / "foreign.toml")
FILES: dict[str, dict[str, Any]] = TABLES["files"]
MACHINE = "H100"
FEW = ("trainer_fsdp.json", "megatron_fsdp.sh")
BATCH = re.compile("micro|gradient_acc|local_batch|per_device")  # keys about microbatches
files = pytest.mark.parametrize("name", [name if name in FEW else pytest.param(name, marks=pytest.mark.prove) for name in FILES])


def plan(path: Path, model: Mapping[str, Any], *words: object) -> Result:
    config = path.with_name("model-config.json")
    config.write_text(json.dumps(model))
    return CliRunner().invoke(cli, ["plan", "--from", str(path), "--model", str(config), *map(str, words)])


def answer(path: Path, model: Mapping[str, Any], *words: object) -> dict[str, Any]:
    """Return the document, also of a configuration that does not fit."""
    result = plan(path, model, *words, "--json")
    assert result.stdout, result.exception
    return json.loads(result.stdout)


def refused(path: Path, model: Mapping[str, Any], *words: object) -> HpcMpError:
    error = plan(path, model, *words).exception
    assert isinstance(error, HpcMpError), error
    return error


def words_of(name: str) -> list[object]:
    """Return the options for a file: its ranks, and what it does not say."""
    row, local = FILES[name], min(8, FILES[name]["ranks"])
    words: list[object] = ["--cluster", f"{MACHINE}:{row['ranks'] // local}", "--set", f"job.ranks_per_node={local}"]
    if "data.sequence_length" not in read_foreign(PLANNER / "foreign" / name).settings:
        words += ["--sequence", row["own"]["data"]["sequence_length"]]
    return [*words, *(f"--set={key}={value}" for key, value in row.get("given", {}).items())]


def model_of(name: str) -> dict[str, Any]:
    return TABLES["models"][FILES[name]["model"]]


def copied(tmp_path: Path, name: str, text: str | None = None) -> Path:
    path = tmp_path / name
    path.write_text(text if text is not None else (PLANNER / "foreign" / name).read_text())
    return path


def framework_of(name: str) -> Framework:
    """Return the factors of a file's framework, without the product's table."""
    word = {"DeepSpeed": "", "Megatron-LM": "Megatron", "PyTorch FSDP": "PyTorch"}.get(FILES[name]["framework"], "NeMo")
    return FRAMEWORKS["PyTorch" if name.startswith("automodel") else word]


def own_layout(name: str, tmp_path: Path) -> tuple[Any, Layout]:
    """Return the shape and the layout of the same job as a job file of ours."""
    row, local = FILES[name]["own"], min(8, FILES[name]["ranks"])
    job = resolve({"job": {"nodes": FILES[name]["ranks"] // local, "ranks_per_node": local}, "model": {"config": model_of(name)},
                   "data": {"files": ["x"], **row["data"]}, "parallel": {"order": "PDT", **row["parallel"]},
                   "train": {"steps": 1, **row["train"]}}, tmp_path)
    return read_shape(job), layout_of(job, read_shape(job))


def plain(value: Any) -> Any:
    return json.loads(json.dumps(value))


def changed(path: Path, changes: Mapping[str, Any]) -> None:
    """Write changes of keys into a configuration, as a user would."""
    text = path.read_text()
    if path.suffix == ".sh":
        for key in changes:
            text = re.sub(rf"(?<![\w-])\"?{key}\b(?!-)[ =]?(?:(?!--)[^\s\"\\#]+)?", "", text)
        said = " ".join(key if value is True else f"{key} {value}" for key, value in changes.items() if value is not None)
        path.write_text(text.replace("pretrain_gpt.py", f"pretrain_gpt.py {said} "))
        return
    tree = yaml.safe_load(text.replace("\t", " "))
    for key, value in changes.items():
        *tables, last = key.split(".")
        table = tree
        for one in tables:
            table = table.setdefault(one, {})
        table.pop(last, None)
        table |= {last: value} if value is not None else {}
    path.write_text(json.dumps(tree) if path.suffix == ".json" else yaml.safe_dump(tree))


@files
def test_a_configuration_is_planned_like_the_same_job_written_here(tmp_path: Path, name: str) -> None:
    """Layout, seconds and bytes are equal, and each key is answered; after a change of a number in the file they are not."""
    path = copied(tmp_path, name)
    document = answer(path, model_of(name), *words_of(name))
    shape, layout = own_layout(name, tmp_path)
    machine, framework = machine_named(MACHINE), framework_of(name)
    assert document["layout"] == plain(asdict(layout))
    assert document["step"] == plain(asdict(step_time(layout, shape, machine, framework)))
    assert document["footprints"] == plain([asdict(rank) for rank in footprint_elsewhere(layout, shape, framework)])
    assert document["fits"] is (max(sum(rank.values()) - rank["host"] for rank in document["footprints"]) <= document["memory"])
    assert {row["key"]: row["kind"] for row in document["keys"]} == {row.key: row.kind for row in read_foreign(path).answers}
    before, after = FILES[name]["changed"]
    other = answer(copied(tmp_path, name, path.read_text().replace(before, after)), model_of(name), *words_of(name))
    assert other["layout"] != document["layout"]


@files
def test_better_layouts_are_reached_by_their_changes(tmp_path: Path, name: str) -> None:
    """The file with the changes has the layout, the bytes and the seconds that were promised, and they are better; without one
    of the changes it has another layout, or cannot be planned."""
    document = answer(copied(tmp_path, name), model_of(name), *words_of(name))
    seconds, shortest = document["step"]["seconds"], [len(plan["changes"]) for plan in document["better"]]
    assert shortest and shortest == sorted({*shortest}, reverse=True)
    assert name == "megatron_fsdp.sh" or any(BATCH.search(key) for plan in document["better"] for key in plan["changes"])
    for better in document["better"]:
        path = copied(tmp_path, name)
        changed(path, better["changes"])
        again = answer(path, model_of(name), *words_of(name))
        assert again["layout"] == better["layout"] and again["fits"]
        assert (again["step"], again["footprints"]) == (better["step"], better["footprints"])
        assert better["step"]["seconds"] < 0.99 * seconds or not document["fits"]
        path = copied(tmp_path, name)
        changed(path, dict([*better["changes"].items()][1:]))
        result = plan(path, model_of(name), *words_of(name), "--json")
        assert not result.stdout or json.loads(result.stdout)["layout"] != better["layout"]


def labelled(text: str) -> dict[str, str]:
    return {line[:10].strip(): line for line in text.splitlines() if line[:10].strip()}


def test_a_person_reads_all_keys_and_what_to_change(tmp_path: Path) -> None:
    name = "llama3_8b.sh"
    text = plan(copied(tmp_path, name), model_of(name), *words_of(name)).stdout
    assert text.startswith("fits ") and "llama3_8b.sh (Megatron-LM) has 32 keys:" in text
    lines = labelled(text)
    assert "--use-mcore-models" in lines["no effect"] and "--DTYPE_ARGS-in-a-condition" in lines["not known"]
    assert 'parallel.recompute = "none"' in lines["assumed"] and "data.sequence_length" not in lines["assumed"]
    assert "--tensor-model-parallel-size 2 → parallel.tensor = 2" in text and "as the model of --model: --num-layers 32" in text
    assert re.search(r"faster +[\d.]+ % more tokens/s: .* with\n( {12}\S.*\n)+", text)
    assert all(row.key in text for row in read_foreign(PLANNER / "foreign" / name).answers)
    stray = (PLANNER / "foreign" / name).read_text().replace("--bf16", "--bf61")
    lines = labelled(plan(copied(tmp_path, name, stray), model_of(name), *words_of(name)).stdout)
    assert "--bf61" in lines["not known"] and "train.precision" in lines["assumed"]


LARGE = {"model_type": "llama", "num_hidden_layers": 32, "hidden_size": 4096, "num_attention_heads": 32,
         "num_key_value_heads": 8, "intermediate_size": 14336, "vocab_size": 128256, "max_position_embeddings": 131072}


@pytest.mark.parametrize(("name", "words"), [
    ("automodel_fsdp2.yaml", ("--cluster", "A100 40GB:2", "--set", "train.global_batch=512", "--sequence", "16384")),
    ("ds_zero2_offload.json", ("--cluster", "H100:1"))])
def test_what_does_not_fit_is_refused_with_its_remedy(tmp_path: Path, name: str, words: tuple[str, ...]) -> None:
    """The refusal names the file's keys; with them it fits. With two layers and short samples, nothing is refused."""
    path = copied(tmp_path, name)
    error, document = refused(path, LARGE, *words), answer(path, LARGE, *words)
    assert not document["fits"] and document["better"] and error.value.startswith(f"{name} on ")
    assert re.match(r"needs [\d.]+ GiB of a GPU's [\d.]+ GiB with \w+: ", error.rule)
    remedy = document["better"][-1]["changes"]
    assert error.remedy.startswith("set ") and all(key in error.remedy for key in remedy)
    text = plan(path, LARGE, *words).stdout
    assert text.startswith("too large ") and "would fit" in text and f"{name} (" in text
    changed(path, remedy)
    assert plan(path, LARGE, *words).exit_code == 0
    assert plan(copied(tmp_path, name), LARGE | {"num_hidden_layers": 2}, *words, "--sequence", "64").exit_code == 0


@pytest.mark.prove
def test_sums_after_each_microbatch_and_more_nodes_are_remedies(tmp_path: Path) -> None:
    """AutoModel keeps whole gradients until a step's end unless told otherwise. Where only more nodes help, nothing else is
    changed."""
    model = LARGE | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
    text = "step_scheduler: {global_batch_size: 256, local_batch_size: 1}\ndataset: {seq_len: 2048}\ndistributed: "
    path = copied(tmp_path, "whole.yaml", text + "{strategy: fsdp2, activation_checkpointing: true}")
    document = answer(path, model, "--cluster", "A100 80GB:2")
    assert document["better"]
    assert all(plan["changes"]["distributed.defer_fsdp_grad_sync"] is False for plan in document["better"])
    path = copied(tmp_path, "automodel_fsdp2.yaml")
    error, document = refused(path, model, "--cluster", "A100 80GB:1"), answer(path, model, "--cluster", "A100 80GB:1")
    assert document["better"][-1]["changes"] == {} and re.match(r"start it on 4 nodes, which needs [\d.]+ GiB", error.remedy)
    assert plan(path, model, "--cluster", "A100 80GB:4").exit_code == 0


def test_a_model_that_is_too_large_for_any_layout(tmp_path: Path) -> None:
    """DeepSpeed's file cannot say recomputation: the refusal says what would, and with --set it counts."""
    path = copied(tmp_path, "ds_zero3_infinity.json")
    words = ("--cluster", "H100:2", "--sequence", "65536")
    assert "--set parallel.recompute=full" in refused(path, LARGE, *words).remedy
    with_it = answer(path, LARGE, *words, "--set", "parallel.recompute=full")
    assert with_it["layout"]["recompute"] == "full" and with_it["step"]["parts"]["recompute"] > 0
    assert "use GPUs with more memory" in refused(path, LARGE, "--cluster", "V100:1", "--sequence", "131072",
                                                  "--set", "parallel.recompute=full").remedy


def test_the_command_line_holds_in_place_of_the_file(tmp_path: Path) -> None:
    path = copied(tmp_path, "gpt_strings.sh")
    words = (*words_of("gpt_strings.sh"), "--global-batch", "128", "--set", "parallel.tensor=2")
    document = answer(path, model_of("gpt_strings.sh"), *words)
    kinds = {row["key"]: row["kind"] for row in document["keys"]}
    assert kinds["--global-batch-size"] == "counted as train.global_batch = 128" and kinds["--bf16"] == "taken"
    layout = document["layout"]
    assert (layout["degrees"]["tensor"], layout["samples"], layout["microbatches"]) == (2, 2, 16)
    assert document["better"] and all(plan["layout"]["degrees"]["tensor"] == 2 for plan in document["better"])


def test_a_written_job_is_the_same_job(tmp_path: Path) -> None:
    """``--write`` converts a configuration; ``--html`` draws it."""
    made, page, name = tmp_path / "job.toml", tmp_path / "page.html", "nemo2.yaml"
    result = plan(copied(tmp_path, name), model_of(name), *words_of(name), "--write", made, "--html", page, "--explain")
    assert result.exit_code == 0 and "\nmemory " in result.stdout and "twice" not in result.stdout
    job = load_job(made)
    assert layout_of(job, read_shape(job)) == own_layout(name, tmp_path)[1] and "tensor 4" in page.read_text()


@pytest.mark.parametrize("name", ["ds_pipeline.json", "ds_autotp.json", "trainer_fsdp.json", "mixtral_8x7b.sh"])
def test_frameworks_are_asked_only_for_what_they_can(tmp_path: Path, name: str) -> None:
    """DeepSpeed's pipelines share out no gradients, and AutoTP no parameters; FSDP has no pipeline; Megatron's stages are even,
    and its experts want sequence parallelism. The plan of our own engine breaks each of these rules for some file."""
    document = answer(copied(tmp_path, name), model_of(name), *words_of(name))
    for layout in (plan["layout"] for plan in document["better"]):
        degrees = layout["degrees"]
        assert layout["schedule"] in ("1f1b", "interleaved_1f1b") and layout["order"] == "PDT"
        assert degrees["pipeline"] == 1 or layout["zero"] < 2
        assert degrees["tensor"] == 1 or (layout["zero"] < 3 and (degrees["expert"] == 1 or layout["sequence_parallel"]))
        assert name == "mixtral_8x7b.sh" or degrees["pipeline"] == document["layout"]["degrees"]["pipeline"]


def test_a_remedy_that_the_framework_refuses_is_not_named(tmp_path: Path) -> None:
    """ZeRO-3 and AutoTP would fit, but a pipeline of DeepSpeed takes neither. Without the pipeline, the remedy is one of them."""
    model = LARGE | {"num_hidden_layers": 80, "hidden_size": 8192, "num_attention_heads": 64, "intermediate_size": 28672}
    path, words = copied(tmp_path, "ds_pipeline.json"), ("--cluster", "A100 40GB:8", "--sequence", "512")
    assert refused(path, model, *words).remedy.startswith("recompute blocks in the program")
    changed(path, {"pipeline.stages": 1})
    assert re.match(r"set (zero_optimization.stage = 3|tensor_parallel)", refused(path, model, *words).remedy)


@pytest.mark.parametrize(("name", "words", "part"), [
    ("automodel_3d.yaml", ("--cluster", "H100:3"), r"is not data\(1\) × tensor\(4\) × pipeline\(4\) × context\(1\) = 16"),
    ("accelerate_fsdp.yaml", ("--cluster", "H100:2"), "states no batch size"),
    ("ds_zero1.json", ("--machine", "H100"), "given nodes"),
    ("ds_zero1.json", ("--cluster", "H100:4", "--goal", "gpus"), "other goals"),
    ("ds_zero1.json", ("--nodes", "4"), "is not a machine"),
    ("ds_zero1.json", ("--cluster", "H100:4", "--set", "parallel.tensor=3"), r"data\(10\) × tensor\(3\)")])
def test_a_question_without_an_answer_is_refused(tmp_path: Path, name: str, words: tuple[str, ...], part: str) -> None:
    assert re.search(part, str(refused(copied(tmp_path, name), model_of(name), *words)))


@pytest.mark.parametrize(("text", "part"), [('{"train_batch_size": ', "is damaged"), ('{"learning": 1}', "no keys of DeepSpeed"),
                                            ('{"train_batch_size": "many"}', "must be a whole number"),
                                            ('{"train_batch_size": 8, "zero_optimization": {"stage": 7}}', "parallel.zero = 7")])
def test_a_broken_file_is_refused(tmp_path: Path, text: str, part: str) -> None:
    assert part in str(refused(copied(tmp_path, "broken.json", text), model_of("ds_zero1.json"), "--cluster", "H100:1"))
    good = '{"train_batch_size": 8, "zero_optimization": {"stage": 2}}'
    assert plan(copied(tmp_path, "broken.json", good), model_of("ds_zero1.json"), "--cluster", "H100:1").exit_code == 0
