"""The table of a run directory's files: it is complete, and no other room writes one of its names."""

import ast
import re
from collections.abc import Iterator
from pathlib import Path

import pytest
from tables import table

from hpc_mp.base.assets import asset
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.rundir.layout import FILES, described

PACKAGE = Path(__file__).resolve().parents[2] / "hpc_mp"
# The same name for something that is no file of a run directory.
OTHERS = table(__file__, "layout.toml", "others")


def _shape(name: str) -> str:
    """``log/rank-{rank:05d}.log`` as ``log/rank-*.log``."""
    return re.sub(r"\{.*?\}", "*", name)


SHAPES = {_shape(each.name).rstrip("/") for each in FILES}
PLAIN = {shape.rpartition("/")[2] for shape in SHAPES if not shape.rpartition("/")[2].startswith("*")}


def literals(source: str) -> Iterator[tuple[str, bool]]:
    """Every string of a module that has no blank in it, f-strings with ``*`` for what they fill in; and whether it is joined to a
    path (``folder / "name"``)."""
    nodes = tuple(ast.walk(ast.parse(source)))
    joined = {id(node.right) for node in nodes if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Div)}
    inner = {id(part) for node in nodes if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in nodes:
        if isinstance(node, ast.JoinedStr):
            text = "".join(part.value if isinstance(part, ast.Constant) else "*" for part in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in inner:
            text = node.value
        else:
            continue
        if not re.search(r"\s", text):
            yield text, id(node) in joined


def names_of_runs(source: str) -> list[str]:
    """The strings that name a file of a run directory; a bare word ("log", "stop") only where it is joined to a path."""
    found = []
    for text, joined in literals(source):
        shape = re.sub(r"\d{5,}", "*", text)
        is_name = shape.rpartition("/")[2] in PLAIN or any(shape.endswith(f"/{each}") for each in SHAPES)
        if is_name and (joined or re.search(r"[.*]", shape) or "/" in shape):
            found.append(text)
    return found


def test_no_other_room_names_a_file_of_a_run_directory() -> None:
    found = {(str(path.relative_to(PACKAGE)), name) for path in PACKAGE.rglob("*.py")
             if path.parent.name != "rundir" for name in names_of_runs(path.read_text(encoding="utf-8"))}
    assert {" ".join(pair) for pair in found} == OTHERS.keys()


@pytest.mark.parametrize("line", table(__file__, "layout.toml", "planted"))
def test_a_planted_name_is_found(line: str) -> None:
    assert names_of_runs(line)


@pytest.mark.parametrize("line", ['command("stop")', 'rows["log"]', '"placement.json says rank 1"', 'path / "config.json"'])
def test_other_words_are_no_names(line: str) -> None:
    assert not names_of_runs(line)


def test_every_file_is_explained_once() -> None:
    names, rows = [each.name for each in FILES], described()
    assert names == [*rows] and len(names) == len(set(names)) > 30
    for name, row in rows.items():
        assert row["holds"] and not row["holds"].endswith(".")
        assert (name.endswith("/") and "*" not in _shape(name)) or (row["writer"] and row["readers"]), name


def test_scripts_of_the_nodes_use_the_same_names() -> None:
    """Shell scripts cannot ask Python: what they write below the run directory is in the table."""
    written = {
        *re.findall(r"--output=(log/\S+)", asset("slurm/job.sbatch.j2").read_text(encoding="utf-8")),
        *re.findall(r'\$HPC_MP_RUN/([\w./-]+)"', asset("slurm/job.sbatch.j2").read_text(encoding="utf-8")),
        *re.findall(r'\$run/([^"/ ]+/[^"/ .][^" ]*)', asset("slurm/node-start.sh").read_text(encoding="utf-8")),
        *re.findall(r'\$run/([^" ]+)', asset("slurm/node-end.sh").read_text(encoding="utf-8")),
    }
    shapes = {re.sub(r"\$\w+|%\w", "*", name) for name in written}
    assert shapes == {
        "log/node-*.log", "job.toml", "program.sh", "batch.environ", "nodes/*.json", "log/nccl/*", "log/kernel-*.log"}
    assert shapes <= SHAPES


def test_files_of_a_pattern_are_made_found_and_read_back(tmp_path: Path) -> None:
    run = create_run(tmp_path, "name")
    for attempt, rank in ((1, 3), (1, 100_000), (2, 0)):
        run.failure(attempt, rank).write_text("{}")
    assert run.failure(1, 3) == run.path / "failures" / "attempt-1-rank-00003.json"
    assert [run.failure.values(path) for path in run.failure.found(1)] == [("1", "00003"), ("1", "100000")]
    assert len(run.failure.found()) == 3 and not run.failure.found(3)
    run.node_log("a[1]").write_text("")
    assert [run.node_log.values(path) for path in run.node_log.found("a[1]")] == [("a[1]",)]
    assert not run.node_log.found("a1")
    assert RunDirectory.metrics.name == run.metrics.name
