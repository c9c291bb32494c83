"""Schedules as tables: CSV out and back in, drawings, the command, and a table that a job file names."""

import json
import tomllib
from pathlib import Path

import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from schedules import Request, requests
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cli.schedule import draw
from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import check_job, layout_of, read_shape, undivided
from hpc_mp.layout.schedule import Action, Reduce, build, simulate
from hpc_mp.layout.schedule.table import from_csv, to_csv, to_dict
from hpc_mp.layout.schedule_of import schedule_of

GOLDEN = Path(__file__).parents[1] / "golden"


def test_csv_golden() -> None:
    assert to_csv(build("1f1b", 4, 4)) == (
        "0F0,0F1,0F2,0F3,,,,0B0,,0B1,,0B2,,0B3\n"
        ",1F0,1F1,1F2,,,1B0,1F3,1B1,,1B2,,1B3,\n"
        ",,2F0,2F1,,2B0,2F2,2B1,2F3,2B2,,2B3,,\n"
        ",,,3F0,3B0,3F1,3B1,3F2,3B2,3F3,3B3,,,\n")


@given(requests(), st.sampled_from(("last", "each")))
def test_a_table_reads_as_the_schedule_that_it_was(request: Request, reduce: Reduce) -> None:
    schedule = build(*request, reduce)
    assert from_csv(to_csv(schedule), reduce) == schedule


def test_torch_reads_the_csv() -> None:
    schedules = pytest.importorskip("torch.distributed.pipelining.schedules")
    if not hasattr(schedules, "_Action"):
        pytest.skip("torch's private _Action is gone")
    for name in ("1f1b", "zero_bubble"):
        lines = to_csv(build(name, 3, 4)).splitlines()
        read = [[schedules._Action.from_str(text) for text in line.split(",")] for line in lines]
        assert [[str(op) for op in rank if op is not None] for rank in read] == [
            [text for text in line.split(",") if text] for line in lines]


MINE = "0F0,0F1,,,0B0,0I1,0W1\n , 1F0 ,1F1,1B0,1I1,,1W1\n\n"  # the second backward in parts
ONE = "0F0,,0B0\n"


def test_a_table_of_ones_own() -> None:
    schedule = from_csv(MINE)
    assert (schedule.placement, schedule.microbatches) == ((0, 1), 2)
    assert [a.kind for a in schedule.ranks[1]] == ["RECV_F", "F", "RECV_F", "F", "B", "SEND_B", "I", "SEND_B", "W", "REDUCE"]


WRONG = tomllib.loads(Path(__file__).with_name("wrong_tables.toml").read_text(encoding="utf-8"))["wrong"]


@pytest.mark.parametrize(("text", "reason"), WRONG)
def test_a_wrong_table_is_refused_with_the_reason(tmp_path: Path, text: str, reason: str) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(text)
    with pytest.raises(HpcMpError) as refused:
        run("--schedule", str(path))
    assert reason in str(refused.value) and str(path) in str(refused.value)


def test_a_file_that_is_no_table(tmp_path: Path) -> None:
    (tmp_path / "bytes.csv").write_bytes(b"\xff\xfe0\x00")
    for path, rule in ((tmp_path / "none.csv", "cannot be read (No such file"), (tmp_path / "bytes.csv", "is not UTF-8 text")):
        with pytest.raises(HpcMpError) as refused:
            run("--schedule", str(path))
        assert rule in str(refused.value)


# --- a job file ------------------------------------------------------------------------------------------------------


def job(directory: Path, layers: int = 8, **parallel: object) -> JobSpec:
    return resolve({
        "job": {"ranks_per_node": 4},
        "model": {"config": {"model_type": "gpt2", "n_layer": layers, "n_embd": 64, "n_head": 4}},
        "data": {"files": ["*.txt"], "sequence_length": 64}, "train": {"steps": 1, "global_batch": 24},
        "parallel": {"pipeline": 2, **parallel},
    }, directory)


@pytest.mark.parametrize(("parallel", "layers"), table(__file__, "schedule_table.toml", "cuts"))
def test_the_model_is_cut_into_all_stages(tmp_path: Path, parallel: dict[str, object], layers: list[int]) -> None:
    spec = job(tmp_path, **parallel)
    shape = read_shape(spec)
    check_job(spec, shape)
    cut = layout_of(spec, shape).layers
    assert (sum(cut), len(cut)) == (8, len(layers)) and ("partition" not in parallel or cut == tuple(layers))
    assert len(schedule_of(undivided(spec)).placement) == len(cut)


@pytest.mark.parametrize("zero", range(4))
def test_zero_2_and_3_synchronise_after_each_backward(tmp_path: Path, zero: int) -> None:
    schedule = schedule_of(undivided(job(tmp_path, schedule="zero_bubble", zero=zero, microbatches=6)))
    assert sum(action.kind == "REDUCE" for action in schedule.ranks[0]) == (6 if zero >= 2 else 1)


def test_microbatches_left_out_can_be_interleaved(tmp_path: Path) -> None:
    spec = job(tmp_path, schedule="interleaved_1f1b", virtual_stages=2)
    assert spec.microbatches == 6  # of 12 sequences per replica, at most 8, a multiple of 2
    assert schedule_of(undivided(spec)).stages == 4


def test_a_job_takes_a_table_beside_it(tmp_path: Path) -> None:
    (tmp_path / "mine.csv").write_text(MINE)
    spec = job(tmp_path, schedule="mine.csv", microbatches=2)
    assert spec.parallel.schedule == str(tmp_path / "mine.csv")
    check_job(spec, read_shape(spec))
    assert schedule_of(undivided(spec)) == from_csv(MINE)


@pytest.mark.parametrize(("text", "parallel", "value", "rule", "remedy"), [
    (ONE, {"microbatches": 1}, "parallel.pipeline = 2", "is for 1 pipeline ranks", "set parallel.pipeline to 1"),
    (MINE, {"microbatches": 4}, "parallel.microbatches = 4", "is for 2 microbatches", "set parallel.microbatches to 2"),
    (to_csv(build("zero_bubble_v", 2, 4)), {"microbatches": 4}, "parallel.virtual_stages = 1", "is for 2 stages per rank",
     "set parallel.virtual_stages to 2"),
    (MINE.replace("1F0", "1B0"), {"microbatches": 2}, "schedule",
     "is not a valid schedule: F(stage 1, microbatch 0) appears 0 times", "correct the table")])
def test_a_table_of_other_sizes_is_refused(tmp_path: Path, text: str, parallel: dict[str, object], value: str, rule: str,
                                           remedy: str) -> None:
    (tmp_path / "mine.csv").write_text(text)
    spec = job(tmp_path, schedule="mine.csv", **parallel)
    with pytest.raises(HpcMpError) as refused:
        check_job(spec, read_shape(spec))
    message = str(refused.value)
    assert all(part.lower() in message.lower() for part in (value, rule, remedy)), message


# --- drawing and command ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("file", "request_"), table(__file__, "schedule_table.toml", "drawings"))
def test_drawing_golden(file: str, request_: Request) -> None:
    text = draw(build(*request_), width=80).plain
    assert max(map(len, text.splitlines())) <= 80
    assert text + "\n" == (GOLDEN / file).read_text(encoding="utf-8")


def test_drawing_colours_each_kind() -> None:
    texts = [draw(build(name, 1, 1)) for name in ("gpipe", "zero_bubble")]
    drawn = {(text.plain[span.start : span.end].strip(), span.style) for text in texts for span in text.spans}
    assert drawn == {("F0", "cyan"), ("B0", "green"), ("I0", "yellow"), ("W0", "magenta")}


def run(*arguments: str) -> str:
    result = CliRunner().invoke(cli, ["schedule", *arguments], catch_exceptions=False)
    if isinstance(result.exception, HpcMpError):
        raise result.exception
    assert result.exit_code == 0, result.output
    return result.output


def test_command_prints_one_json_document() -> None:
    tree = json.loads(run("--pp", "4", "--microbatches", "8", "--json", "--schedule", "zero_bubble_v"))
    schedule = build("zero_bubble_v", 4, 8)
    assert {key: tree[key] for key in ("placement", "ranks")} == to_dict(schedule)
    sizes = ("schedule", "pipeline", "microbatches", "virtual_stages", "placement")
    assert [tree[key] for key in sizes] == ["zero_bubble_v", 4, 8, 2, [0, 1, 2, 3, 3, 2, 1, 0]]
    assert tree["bubble"] == simulate(schedule).bubble
    assert tree["peak_in_flight"] == [8, 8, 8, 8]
    assert tuple(tuple(Action(**action) for action in rank["actions"]) for rank in tree["ranks"]) == schedule.ranks


def test_command_prints_table_drawing_and_csv() -> None:
    request = ("--schedule", "interleaved_1f1b", "--pp", "2", "--microbatches", "4", "--virtual-stages", "2")
    assert run(*request, "--csv") == to_csv(build("interleaved_1f1b", 2, 4, 2))
    drawing = run(*request, "--draw")
    assert draw(build("interleaved_1f1b", 2, 4, 2), 80).plain in drawing
    table = run(*request)
    assert "0F0 0SEND_F0" in table and "3RECV_B" not in table  # the last stage receives no gradient
    for text in (drawing, table):
        assert "idle (bubble): 11.1%" in text
        assert text.splitlines()[-1].endswith("5, 3")


def test_command_reads_a_table(tmp_path: Path) -> None:
    path = tmp_path / "mine.csv"
    path.write_text(run("--schedule", "zero_bubble", "--pp", "3", "--microbatches", "5", "--csv"))
    assert run("--schedule", str(path), "--csv") == path.read_text()
    with pytest.raises(HpcMpError, match=r"--pp = 4: the table .* is for 3 pipeline ranks. Set --pp to 3"):
        run("--schedule", str(path), "--pp", "4")


@pytest.mark.parametrize("arguments", table(__file__, "schedule_table.toml", "refused"))
def test_command_refuses_wrong_input(arguments: list[str]) -> None:
    assert isinstance(CliRunner().invoke(cli, ["schedule", *arguments]).exception, HpcMpError)
