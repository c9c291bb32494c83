"""What the documents say exists: every key with its default, every command, every file they name."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import click
import pytest

from hpc_mp.cli.main import VERBS, cli
from hpc_mp.job import JobSpec

ROOT = Path(__file__).resolve().parents[2]
README = (ROOT / "README.md").read_text(encoding="utf-8")
FOLDERS = (".", "docs", "slurm", "env", "cyclecloud", "benchmarks")
DOCUMENTS = sorted(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md"))
ROW = re.compile(r"^\| `(\w+\.\w+)` \| (?:`(.*?)`|–) \|", re.MULTILINE)
FILE = re.compile(r"`((?:hpc_mp|slurm|env|cyclecloud|tests|docs|benchmarks|demo|\.ci)/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")
NONE = object()


def documented(texts: Iterable[str]) -> list[tuple[str, Any]]:
    """(key, default) of every row that describes a key; NONE where it has no default."""
    rows = (row for text in texts for row in ROW.findall(text))
    return [(key, tomllib.loads(f"v = {default}")["v"] if default else NONE) for key, default in rows]


def actual() -> dict[str, Any]:
    """The default of every key of the job file; NONE where it has no value of its own."""
    found = {}
    for section, field in JobSpec.model_fields.items():
        assert isinstance(field.annotation, type)
        for key, inner in field.annotation.model_fields.items():
            default = inner.get_default()
            found[f"{section}.{key}"] = NONE if inner.is_required() or default is None else (
                list(default) if isinstance(default, tuple) else default)
    return found


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


def test_every_key_is_documented_once_with_its_default_and_none_is_invented() -> None:
    rows = documented((ROOT / "docs" / name).read_text(encoding="utf-8") for name in ("job-file.md", "slurm.md"))
    assert len(rows) == len(dict(rows)), "a key is described twice"
    assert dict(rows) == actual()


def test_a_wrong_default_or_key_would_be_seen() -> None:
    assert documented(["| `slurm.chain` | `1` | x |\n| `slurm.chian` | – | x |"]) == [("slurm.chain", 1), ("slurm.chian", NONE)]
    assert actual()["slurm.chain"] == 0 and "slurm.chian" not in actual()


def test_the_readme_has_every_command_and_no_other() -> None:
    assert set(re.findall(r"^\| `hpc-mp (\w+)", README, re.MULTILINE)) == set(VERBS)


def unknown_options(text: str) -> list[str]:
    """Calls of a command that there is not, or with an option that it does not have."""
    context, unknown = click.Context(cli), []
    for call, verb, rest in re.findall(r"((?:^    |`)hpc-mp ([a-z]+)([^`\n#]*))", text, re.MULTILINE):
        command = cli.get_command(context, verb)
        commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())] if command else []
        known = {name for each in commands for parameter in each.params for name in (*parameter.opts, *parameter.secondary_opts)}
        if command is None or not set(re.findall(r"--[a-z-]+", rest)) <= known:
            unknown.append(call)
    return unknown


def test_commands_and_options_in_the_documents_exist() -> None:
    assert {path.name: found for path in DOCUMENTS if (found := unknown_options(path.read_text(encoding="utf-8")))} == {}


def test_an_option_that_is_not_there_would_be_seen() -> None:
    assert unknown_options("`hpc-mp status RUN --json` or `hpc-mp status RUN --explain`") == ["`hpc-mp status RUN --explain"]


def test_make_targets_in_the_documents_exist() -> None:
    targets = set(re.findall(r"^([a-z]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    for path in DOCUMENTS:
        assert set(re.findall(r"(?:`|^    )make ([a-z]+)", path.read_text(encoding="utf-8"), re.MULTILINE)) <= targets, path.name


@pytest.mark.parametrize("document", DOCUMENTS, ids=lambda path: str(path.relative_to(ROOT)))
def test_files_and_links_lead_somewhere(document: Path) -> None:
    text = document.read_text(encoding="utf-8")
    assert missing_files(text) == []
    for name, anchor in LINK.findall(text):
        target = document.parent / name if name else document
        assert target.exists(), name
        assert not anchor or anchor in anchors(target), f"{name}#{anchor}"


def test_a_file_that_is_not_there_would_be_seen() -> None:
    assert missing_files("`slurm/versions.toml` and `slurm/verions.toml`") == ["slurm/verions.toml"]


@pytest.mark.parametrize("folder", ["slurm", "env", "cyclecloud"])
def test_the_tables_of_data_folders_are_complete(folder: str) -> None:
    named = re.findall(r"^\| `([\w.-]+)` \|", (ROOT / folder / "README.md").read_text(encoding="utf-8"), re.MULTILINE)
    there = {path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {"README.md"}
    assert there <= set(named)
