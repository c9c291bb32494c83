"""What the documents say exists: every key with its default, every command, every file they name."""

import dataclasses
import html
import importlib.util
import os
import re
import subprocess
import sys
from pathlib import Path
from types import ModuleType
from typing import ClassVar

import click
import pytest
from tables import table

from hpc_mp.cli.main import cli
from hpc_mp.job import JobSpec

ROOT = Path(__file__).resolve().parents[2]
FOLDERS = (".", "slurm", "env", "cyclecloud", "benchmarks")
DOCUMENTS = sorted([*(path for folder in FOLDERS for path in (ROOT / folder).glob("*.md")), *(ROOT / "docs").rglob("*.md")])
FILE = re.compile(r"`((?:hpc_mp|slurm|env|cyclecloud|tests|docs|benchmarks|demo|\.ci)/[\w./-]+)`")
LINK = re.compile(r"\]\((?!https?:)([^)#]*)(?:#([^)]*))?\)")


def module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
    assert spec is not None and spec.loader is not None
    loaded = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(loaded)
    return loaded


reference, hooks = module("reference"), module("hooks")


def anchors(document: Path) -> set[str]:
    """Of its headings, as GitHub makes them."""
    heads = re.findall(r"^#+ (.*)$", document.read_text(encoding="utf-8"), re.MULTILINE)
    return {re.sub(r"[^\w -]", "", head.lower()).replace(" ", "-") for head in heads}


def missing_files(text: str) -> list[str]:
    return [name for name in FILE.findall(text) if not (ROOT / name).exists()]


@pytest.mark.parametrize("page", sorted(reference.PAGES))
def test_the_reference_is_made_from_the_code(page: str) -> None:
    assert reference.path(page).read_text(encoding="utf-8") == reference.page(page), "`make reference` writes it anew"


def test_contributing_has_the_floors_that_are_checked() -> None:
    text = (ROOT / "CONTRIBUTING.md").read_text(encoding="utf-8")
    assert "| `planner` |" in text and text == reference.with_rooms(text), "`make reference` writes it anew"


def test_the_reference_holds_nothing_else() -> None:
    assert {path.stem for path in (ROOT / "docs" / "reference").iterdir()} == set(reference.PAGES) - reference.USER


def test_every_field_of_the_lines_of_a_run_is_explained() -> None:
    for file, record in reference.LINES:
        explained = reference.attributes(record)
        assert list(explained) == [field.name for field in dataclasses.fields(record)], file.name
        assert all(text.endswith(".") for text in explained.values())


def undocumented(model: type) -> list[str]:
    """Keys of a section without a sentence of their own."""
    texts = reference.documented(model)
    return [key for key in model.model_fields if not texts.get(key)]  # type: ignore[attr-defined]


def test_every_key_of_the_job_file_says_what_follows_from_it() -> None:
    sections = [field.annotation for field in JobSpec.model_fields.values()]
    assert [missing for section in sections if isinstance(section, type) and (missing := undocumented(section))] == []


class Section:
    """For the test below."""

    model_fields: ClassVar = {"told": None, "untold": None}
    told: int
    """Said."""
    untold: int


def test_a_key_without_a_word_would_be_seen() -> None:
    assert undocumented(Section) == ["untold"]


def test_a_default_is_written_as_a_job_file_spells_it() -> None:
    fields = JobSpec.model_fields["train"].annotation.model_fields  # type: ignore[union-attr]
    assert [reference.default(fields[key]) for key in ("steps", "betas", "optimizer", "dropout")] == [
        "–", "`[0.9, 0.95]`", '`"adamw"`', "–"]


def test_the_site_builds_without_a_warning(tmp_path: Path) -> None:
    done = subprocess.run([sys.executable, "-m", "mkdocs", "build", "--strict", "--quiet", "--site-dir", str(tmp_path / "site")],
                          cwd=ROOT, capture_output=True, text=True, timeout=120,
                          env={**os.environ, "NO_MKDOCS_2_WARNING": "1"})
    assert done.returncode == 0, done.stderr
    first = (tmp_path / "site" / "tutorials" / "first-job" / "index.html").read_text(encoding="utf-8")
    assert "<pre><code>hpc-mp init\n</code></pre>" in first and "<pre class=no-copy><code>this machine " in first
    assert "job.nodes" in (tmp_path / "site" / "reference" / "job-file" / "index.html").read_text(encoding="utf-8")


@pytest.mark.parametrize(("block", "copied", "shown"), table(__file__, "docs.toml", "copied"))
def test_the_copy_button_gives_what_is_typed(block: str, copied: list[str], shown: list[str]) -> None:
    text = "Before:\n\n" + "".join(f"    {line}" if line.strip() else line for line in block.splitlines(True)) + "\nBehind.\n"
    page = hooks.on_page_markdown(text)
    blocks = re.findall(r"<pre( class=no-copy)?><code>(.*?)\n</code></pre>", page, re.DOTALL)
    assert [html.unescape(found) for out, found in blocks if not out] == copied
    assert [html.unescape(found) for out, found in blocks if out] == shown
    assert page.startswith("Before:\n\n") and page.endswith("\nBehind.\n")


@pytest.mark.parametrize("page", [path for path in DOCUMENTS if re.search(r"^(    )?\$ ", path.read_text(), re.MULTILINE)],
                         ids=lambda path: path.stem)
def test_no_page_mixes_what_is_typed_with_what_is_printed(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    shown = hooks.on_page_markdown(text)
    assert page.is_relative_to(ROOT / "docs") and not re.search(r"^(    |<pre.*<code>)?\$ ", shown, re.MULTILINE)
    copied = "\n".join(html.unescape(found) for found in re.findall(r"<pre><code>(.*?)</code>", shown, re.DOTALL)).split("\n")
    typed = re.findall(r"^    \$ (.*)", text, re.MULTILINE)
    assert typed and [line for line in copied if line in typed] == typed


def unknown_options(text: str) -> list[str]:
    """Calls of a command that there is not, or with an option that it does not have."""
    context, unknown = click.Context(cli), []
    for call, verb, rest in re.findall(r"((?:^    |`)hpc-mp ([a-z]+)([^`\n#]*))", text, re.MULTILINE):
        command = cli.get_command(context, verb)
        commands = [command, *(command.commands.values() if isinstance(command, click.Group) else ())] if command else []
        known = {name for each in commands for parameter in each.params for name in (*parameter.opts, *parameter.secondary_opts)}
        own = re.split(r" --(?= |$)", rest)[0]  # behind two dashes stand the words of another command
        if command is None or not set(re.findall(r"--[a-z-]+", own)) <= known:
            unknown.append(call)
    return unknown


def test_commands_and_options_in_the_documents_exist_and_another_would_be_seen() -> None:
    assert {path.name: found for path in DOCUMENTS if (found := unknown_options(path.read_text(encoding="utf-8")))} == {}
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
    assert ({path.name for path in (ROOT / folder).iterdir() if path.is_file()} - {"README.md"}) <= set(named)
