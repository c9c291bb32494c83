"""``hpc-mp model --list``: the verdict on every type."""

import json
from pathlib import Path

import pytest
from click.testing import CliRunner

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.layout.models import FAMILIES


def test_every_type_has_a_verdict_with_its_reason() -> None:
    result = CliRunner().invoke(cli, ["model", "--list", "--json"])
    assert result.exit_code == 0
    verdicts = {verdict["model_type"]: verdict for verdict in json.loads(result.stdout)["types"]}
    assert all(verdicts[name]["verified"] and verdicts[name]["table"] for name in FAMILIES)
    assert verdicts["mistral"]["verified"] and not verdicts["mistral"]["table"]
    assert "random numbers" in verdicts["phimoe"]["reason"]
    assert all(bool(verdict["reason"]) is not verdict["verified"] for verdict in verdicts.values())


def test_the_list_is_a_table() -> None:
    lines = CliRunner().invoke(cli, ["model", "--list"]).stdout.splitlines()
    row = next(line for line in lines if line.startswith("phimoe"))
    assert "–" in row and next(line for line in lines if line.startswith("llama ")).split()[1] == "✓"


@pytest.mark.parametrize("words", [[], ["llama", "--list"]])
def test_one_of_a_model_and_the_list_is_shown(words: list[str]) -> None:
    result = CliRunner().invoke(cli, ["model", *words])
    assert isinstance(result.exception, HpcMpError) and "MODEL or --list" in result.exception.rule


@pytest.mark.prove
@pytest.mark.parametrize(("kind", "remedy"), [("deepseek_v2", "give the config.json"), ("afmoe", "use a model of another type")])
def test_a_type_whose_defaults_lack_values_asks_for_them(kind: str, remedy: str) -> None:
    refusal = CliRunner().invoke(cli, ["model", kind]).exception
    assert isinstance(refusal, HpcMpError) and refusal.remedy.startswith(remedy)
    assert ("defaults in transformers that are incomplete" in refusal.rule) is (kind == "deepseek_v2")


def test_degrees_are_shown_in_runs(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "gpt2", "n_embd": 768, "n_head": 12}')
    assert "tensor 1–4, 6, 12, unevenly up to 12" in CliRunner().invoke(cli, ["model", str(config)]).stdout


def test_of_a_model_that_sees_the_language_model_is_shown(tmp_path: Path) -> None:
    config = tmp_path / "config.json"
    config.write_text('{"model_type": "llava", "text_config": {"model_type": "llama"}, "vision_config": {}}')
    text = " ".join(CliRunner().invoke(cli, ["model", str(config)]).stdout.split())
    assert "llama (LlamaForCausalLM)" in text and "language model of llava, whose other parts are left out" in text


def test_a_model_without_a_table_of_positions_has_any_number() -> None:
    texts = (" ".join(CliRunner().invoke(cli, ["model", name]).stdout.split()) for name in ("t5", "gpt2"))
    assert ["vocabulary 32128, any number of positions" in next(texts), "1024 positions" in next(texts)] == [True, True]
