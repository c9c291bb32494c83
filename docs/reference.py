"""Writes docs/reference: pages made from the code, so that no key, check, rule, file or command is described twice.

``make reference`` writes them; tests/package/test_docs.py compares them with what lies there.
"""

import ast
import dataclasses
import inspect
import re
import sys
import tomllib
from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import click

ROOT = Path(__file__).resolve().parents[1]
sys.path.insert(0, str(ROOT))
sys.path.insert(0, str(ROOT / "cyclecloud" / "lint"))

from cyclecloud_lint.rules import RULES as AZURE  # noqa: E402
from hpc_mp.cli import main as command_line  # noqa: E402
from hpc_mp.cluster.slurm.jobs import AGAIN  # noqa: E402
from hpc_mp.doctor.checks.registry import PASSIVE  # noqa: E402
from hpc_mp.doctor.drift import TRAITS  # noqa: E402
from hpc_mp.environment.findings import ON_MACHINE  # noqa: E402
from hpc_mp.job import program, spec  # noqa: E402
from hpc_mp.job.elsewhere import elsewhere  # noqa: E402
from hpc_mp.job.values import toml_value  # noqa: E402
from hpc_mp.layout.models.types import verdicts  # noqa: E402
from hpc_mp.lint.sbatch.rules import RULES as SBATCH  # noqa: E402
from hpc_mp.lint.slurm_conf.rules_files import RULES as SLURM_FILES  # noqa: E402
from hpc_mp.lint.slurm_conf.rules_site import RULES as SLURM_CONF  # noqa: E402
from hpc_mp.rundir.layout import RunDirectory, described  # noqa: E402
from hpc_mp.rundir.records import Evaluation, StepMetrics  # noqa: E402
from hpc_mp.train.own_loop.keywords import KEYS, OPTIMIZER  # noqa: E402

NOTICE = "<!-- made by docs/reference.py: `make reference` writes it anew -->"
TITLES = {
    "coming-from": """Coming from Hugging Face, DeepSpeed, Megatron or torchtitan

The tables list names from Hugging Face's Trainer and TRL, DeepSpeed, Megatron-LM, torchtitan, torchrun, Lightning and sbatch,
and the corresponding key of a [job file](../reference/job-file.md). If you use one of these names in a job file, the error gives
the same answer. Existing programs (multi-node torchrun, scripts of Accelerate or DeepSpeed) run unchanged with
[`hpc-mp run`](programs.md); for an sbatch script, use [`hpc-mp adopt`](adopt.md). The report of a run has its curves and its
profile; `track.to` also sends curves to other programs.""",
    "job-file": """The job file

A job file is TOML. `hpc-mp init` writes one that runs. `hpc-mp launch` prints every default that it uses, and writes the
resolved file, with all defaults, to the run directory. `--set KEY=VALUE` overrides a key for one start. Relative paths are
relative to the file. If a key does not exist, the error suggests the most similar key. `launch` lists the keys that have no
effect where the job runs (emulated nodes, mpirun, a step of an allocation). “–” means that there is no value.""",
    "run-directory": """The run directory

`job.directory`/NAME/0001, 0002 … holds everything that the launcher and the ranks exchange, as text files. Only you have access
to it.""",
    "checks": """The doctor's checks

“Grew” means within the last three hours, or within one second if there is no earlier reading.""",
    "rules": """The linters' rules

A code never changes its meaning. An error is wrong on every cluster. A finding that depends on the site or the case is at most a
warning.""",
    "keywords": """Keywords of hpc_mp.parallel

These keywords are for [your own training loop](../user/own-loop.md). Most are keys of a [job file](job-file.md) under the name
that is usual in training loops, with the same values, checks and defaults (`microbatches` is 1). In addition, `loss_fn` is your
own loss, `optimizer` has the optimizer's settings (below), `batches` is `"global"` or `"replica"`, and `example` is a batch whose
shapes are checked immediately. For layers that you have written, `outputs` names the tensors of a list that are passed to
`loss_fn`, `inputs` names the arguments with defaults that a batch provides, and `cut` names the linear modules that tensor ranks
cut.""",
    "model-types": """Types of models

The causal language models of transformers, by `model_type`. Verified: loss, gradient norms and parameters of training equal one
process of plain transformers to 1e-12, in fp64, with tensor and pipeline ranks, both, sequence parallelism and ZeRO-3. Other
types are refused before a job starts. `hpc-mp model --list` prints this table; `hpc-mp model TYPE` shows how a type is cut.""",
    "queue-reasons": """Why a job is waiting in Slurm

`hpc-mp status` and `launch --wait` show these explanations next to Slurm's reason. The names are those that `squeue --format=%r`
prints.""",
    "commands": """Commands

Every command exits 0 (done), 1 (the run or a check failed) or 2 (the input is wrong: the value, the rule and the remedy on
standard error). `--json` prints exactly one JSON document.""",
}


def table(head: Sequence[str], rows: Iterable[Sequence[str]]) -> str:
    """A table of Markdown; line breaks and bars of a cell are kept out of its way."""
    lines = [head, ["---"] * len(head), *rows]
    return "\n".join("| " + " | ".join(_cell(text) for text in row) + " |" for row in lines) + "\n"


def _cell(text: str) -> str:
    return re.sub(r"(?<!\\)\|", r"\\|", " ".join(text.split())) or "–"


# --- the job file ----------------------------------------------------------------------------------------------------


def documented(model: type) -> dict[str, str]:
    """The string below every field of a class."""
    (body,) = (node.body for node in ast.parse(inspect.getsource(model)).body if isinstance(node, ast.ClassDef))
    return {
        field.target.id: inspect.cleandoc(text.value.value)
        for field, text in pairwise(body)
        if isinstance(field, ast.AnnAssign) and isinstance(field.target, ast.Name)
        and isinstance(text, ast.Expr) and isinstance(text.value, ast.Constant) and isinstance(text.value.value, str)
    }


def default(field: Any) -> str:
    """As a job file would spell it; a dash where there is none."""
    value = field.get_default()
    if field.is_required() or field.default_factory is not None or value is None:
        return "–"
    return f"`{toml_value(value)}`"


def job_file() -> str:
    text = []
    for name, section in (spec.JobSpec.model_fields | {"program": program.ProgramSpec.model_fields["program"]}).items():
        model = section.annotation
        assert isinstance(model, type)
        texts = documented(model)
        text += [f"## [{name}]", "", inspect.cleandoc(model.__doc__ or ""), "",
                 table(("key", "default", "what follows"),
                       ((f"`{name}.{key}`", default(field), texts[key]) for key, field in model.model_fields.items()))]
    return "\n".join(text)


# --- keywords of a loop ----------------------------------------------------------------------------------------------


def keywords() -> str:
    head, sections = ("keyword", "key of a job file", "default", "what follows"), spec.JobSpec.model_fields

    def rows(names: Mapping[str, str]) -> Iterable[Sequence[str]]:
        for name, key in names.items():
            section, _, field = key.partition(".")
            model = sections[section].annotation
            assert isinstance(model, type)
            text = re.sub(r"\]\(\.\./", "](../", documented(model)[field])
            yield f"`{name}`", f"`{key}`", default(model.model_fields[field]), text  # type: ignore[attr-defined]

    return "\n".join([table(head, rows(KEYS)), "## The keys of `optimizer`", "", table(head, rows(OPTIMIZER))])


# --- the run directory -----------------------------------------------------------------------------------------------


LINES = ((RunDirectory.metrics, StepMetrics), (RunDirectory.evaluations, Evaluation))


def attributes(record: type) -> dict[str, str]:
    """What the docstring of a record says of each of its fields."""
    _, _, section = inspect.cleandoc(record.__doc__ or "").partition("Attributes:\n")
    found = re.findall(r"^    (\w+): (.*?)(?=^    \w+: |\Z)", section, re.MULTILINE | re.DOTALL)
    return {name: " ".join(text.replace("``", "`").split()) for name, text in found}


def run_directory() -> str:
    rows = ((f"`{name}`", row["holds"], row.get("writer", ""), row.get("readers", "")) for name, row in described().items())
    text = [table(("file", "holds", "written by", "read by"), rows)]
    for file, record in LINES:
        fields = attributes(record)
        holds = described()[file.name]["holds"]
        text += [f"## {file.name}", "", f"JSON lines: {holds}. What is not finite is `null`. Other programs may read it "
                 "while the run goes on; keys may be added, none is renamed.", "",
                 table(("field", "holds"), ((f"`{each.name}`", fields[each.name]) for each in dataclasses.fields(record)))]
    return "\n".join(text)


# --- checks and rules ------------------------------------------------------------------------------------------------


def checks() -> str:
    passive = [(f"`{check.code}`", check.reads, check.rule, check.remedy) for check in PASSIVE]
    drift = [(f"`drift-{trait}`", row["what"], "warning: nodes differ", row["remedy"]) for trait, row in TRAITS.items()]
    head = ("check", "reads", "complains", "what to do")
    return "\n".join(["## On a node", "", table(head, passive), "## Nodes that differ", "", table(head, drift)])


def rules() -> str:
    def blank(text: str) -> str:
        return re.sub(r"\{\w+\}", "…", text)

    def rows(table_of: Iterable[Any]) -> list[tuple[str, ...]]:
        return [(f"`{rule.code}`", rule.severity, blank(rule.message), blank(rule.fix)) for rule in table_of]

    head = ("code", "severity", "what is found", "what to do")
    return "\n".join(["## Scripts for sbatch", "", table(head, rows(SBATCH)), "## Variables on a machine", "",
                      table(head, rows(ON_MACHINE)),
                      "## A Slurm cluster", "", table(head, rows(SLURM_CONF)),
                      "## Slurm's files", "", table(head, rows(SLURM_FILES)),
                      "## Templates of Azure CycleCloud", "", table(head, rows(AZURE))])


def queue_reasons() -> str:
    reasons = tomllib.loads((ROOT / "slurm" / "queue-reasons.toml").read_text(encoding="utf-8"))
    return table(("reason", "means", "what to do"), ((_reason(name), *texts) for name, texts in reasons.items()))


def _reason(name: str) -> str:
    return f"`{name.removesuffix(AGAIN)}`{', of a job that has run before' * name.endswith(AGAIN)}"


# --- commands --------------------------------------------------------------------------------------------------------


def commands() -> str:
    text: list[str] = []
    context = click.Context(command_line.cli, info_name="hpc-mp")
    for name in command_line.cli.list_commands(context):
        command = command_line.cli.get_command(context, name)
        assert command is not None
        text += _command(command, click.Context(command, info_name=name, parent=context), 2)
    return "\n".join(text)


def _prose(help_text: str) -> str:
    """Help in Markdown: a paragraph that click is told (by a backspace before it) to leave in its lines is code."""
    found = []
    for paragraph in help_text.split("\n\n"):
        kept = paragraph.startswith("\b\n")
        found.append("\n".join(["```", *paragraph[2:].splitlines(), "```"]) if kept else paragraph)
    return "\n\n".join(found)


def _command(command: click.Command, context: click.Context, depth: int) -> list[str]:
    usage = " ".join(piece for piece in command.collect_usage_pieces(context) if piece != "[OPTIONS]")
    text = [f"{'#' * depth} {context.command_path} {usage}".rstrip(), "", _prose(inspect.cleandoc(command.help or "")), ""]
    if isinstance(command, click.Group):
        for name in command.list_commands(context):
            inner = command.get_command(context, name)
            if inner is not None and not inner.hidden:
                text += _command(inner, click.Context(inner, info_name=name, parent=context), depth + 1)
        return text
    records = [parameter.get_help_record(context) for parameter in command.params]
    options = [(f"`{record[0]}`", record[1]) for record in records if record]
    return text + ([table(("option", "does"), options)] if options else [])


def model_types() -> str:
    return table(("type", "verified", ""), [(f"`{verdict.model_type}`", "✓" if verdict.verified else "–", verdict.reason or (
        "a table here" if verdict.table else "read from transformers")) for verdict in verdicts()])


PAGES: dict[str, Callable[[], str]] = {
    "job-file": job_file, "run-directory": run_directory, "checks": checks, "rules": rules, "queue-reasons": queue_reasons,
    "commands": commands, "model-types": model_types, "keywords": keywords, "coming-from": lambda: coming_from(),
}


USER = frozenset({"coming-from"})  # pages of docs/user


def coming_from() -> str:
    """What other trainers call a key or a value of the job file."""
    tables = elsewhere()
    within = [(f"`[{section}]` {', '.join(f'`{name}`' for name in names)}", f"`{ours}`")
              for section, keys in tables.within.items() for ours, names in _by_answer(keys).items()]
    options = ", ".join(f"`{name}`" for name in sorted(tables.options))
    return "\n\n".join((
        "## Keys", table(("elsewhere", "here"), [
            *((", ".join(f"`{name}`" for name in names), f"`{ours}`") for ours, names in _by_answer(tables.names).items()),
            *within,
            (options, "`slurm.extra`: `extra = { mem = \"64G\" }` in `[slurm]`")]),
        "## Different or unsupported", table(("elsewhere", "here"), [
            (", ".join(f"`{name}`" for name in names), way) for way, names in _by_answer(tables.instead).items()]),
        "## Values", table(("key", "elsewhere", "here"), [
            (f"`{key}`", ", ".join(f"`{theirs}`" for theirs, value in values.items() if value == ours), f"`{toml_value(ours)}`")
            for key, values in tables.values.items() for ours in _distinct(values.values())])))


def _by_answer(names: Mapping[str, str]) -> dict[str, list[str]]:
    answers: dict[str, list[str]] = {}
    for name, answer in names.items():
        answers.setdefault(answer, []).append(name)
    return answers


def _distinct(values: Iterable[Any]) -> list[Any]:
    found: list[Any] = []
    for value in values:
        if value not in found:
            found.append(value)
    return found


def rooms() -> str:
    """The floors of the house, from the arrows that CI checks and the first line of every room."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["tool"]["importlinter"]["contracts"]
    floors = next(contract["layers"] for contract in contracts if contract["type"] == "layers")
    rows = []
    for number, floor in zip(range(len(floors), 0, -1), floors, strict=True):
        for room in floor.split(" | "):
            source = (ROOT / "hpc_mp" / room / "__init__.py").read_text(encoding="utf-8")
            rows.append((str(number), f"`{room}`", (ast.get_docstring(ast.parse(source)) or "").split("\n\n")[0]))
    return table(("floor", "room", "holds"), rows)


def with_rooms(text: str) -> str:
    """CONTRIBUTING with the table of rooms as it is now."""
    return re.sub(r"(?<=<!-- rooms -->\n).*?(?=<!-- /rooms -->)", lambda _: "\n" + rooms() + "\n", text, flags=re.DOTALL)


def page(name: str) -> str:
    """The whole text of a page."""
    return f"# {TITLES[name]}\n\n{NOTICE}\n\n{PAGES[name]().strip()}\n"


def path(name: str) -> Path:
    return ROOT / "docs" / ("user" if name in USER else "reference") / f"{name}.md"


def main() -> None:
    contributing = ROOT / "CONTRIBUTING.md"
    contributing.write_text(with_rooms(contributing.read_text(encoding="utf-8")), encoding="utf-8")
    for name in PAGES:
        path(name).write_text(page(name), encoding="utf-8")


if __name__ == "__main__":
    main()
