"""Evaluation is plain transformers' loss on all held-out tokens, on every layout, and training does not notice it."""

import json
import os
import signal
from collections.abc import Callable
from itertools import product
from pathlib import Path
from typing import Any

import exact
import pytest
from click.testing import CliRunner
from engines import quiet, run_engine
from exact import GPT2, HELD_OUT, LAYOUTS, LLAMA, MIXTRAL, ONE_STEP, WRONG, Engine, Plain, Reference, cases, check_evaluations
from layouts import job, layout, relaunch, start, trained_run
from planting import planted, wrapped
from ranks import exit_codes

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.export import command as export
from hpc_mp.rundir import newest_complete, read_lines, retention
from hpc_mp.rundir.checkpoints import complete_steps, step_of
from hpc_mp.rundir.history import complete
from hpc_mp.train.data import IGNORE, HeldOut, TokenSet, passes, prepare_held_out, prepare_job
from hpc_mp.train.model.transformers_stage import TransformersStage
from hpc_mp.train.pipeline.pipeline import Pipeline
from hpc_mp.train.rank import evaluation
from hpc_mp.train.rank.signals import EXIT_STOPPED

EVERY = ('evaluate.files=["held-out.jsonl"]', "evaluate.every=1", "train.steps=2")
DROPOUT = "train.dropout=0.2"
FREQUENCIES = [("llama with longrope", "cp2 ring"), ("qwen2 with longrope", "pp2 cp2 ulysses 1f1b")]


@pytest.mark.parametrize(("model", "name"), cases(FREQUENCIES, FREQUENCIES[:1]))
def test_an_evaluation_has_the_frequencies_of_whole_samples(engine: Engine, reference: Reference, model: str, name: str) -> None:
    check_evaluations(engine(model, *HELD_OUT, *LAYOUTS[name]), reference(model, *HELD_OUT))


def test_an_evaluation_drops_what_training_would(place: Path, engine: Engine, plain: Plain) -> None:
    """The capacity of experts is the same, and what an evaluation drops is not reported as the next step's."""
    limited = [*HELD_OUT, "train.expert_capacity=0.75"]
    found, right = engine(MIXTRAL, *limited, *LAYOUTS["ep2 zero2"]), plain(job(place, MIXTRAL, limited))
    check_evaluations(found, right)
    assert found.dropped == pytest.approx(right.dropped, rel=1e-12)
    (_, one, _), (_, other, _) = (plain(job(place, MIXTRAL, [
        *HELD_OUT, ONE_STEP, "train.learning_rate=0.0", f"train.expert_capacity={each}"])).evaluations[0] for each in (0.75, 5.0))
    assert abs(one - other) > WRONG, "the same model evaluates otherwise without a limit"


@planted(HeldOut, "batch")
def a_row_counted_twice(batch: Any, held_out: HeldOut, rows: range) -> Any:
    """The last microbatch is filled with earlier rows."""
    first = min(rows.start, len(held_out) - len(rows))
    return batch(held_out, range(first, first + len(rows)))


SPOILT: dict[str, tuple[Callable[[], None], list[str]]] = {
    "dropout is left on": (wrapped(TransformersStage, "eval", lambda evaluating: lambda self: self), [DROPOUT]),
    "a row is counted twice": (a_row_counted_twice, layout(data=2)),
    "replicas share nothing out": (wrapped(evaluation, "passes", lambda passes: lambda rows, *, data_rank, **more: passes(
        rows, data_rank=0, **more)), layout(data=2)),
}


@pytest.mark.parametrize("control", SPOILT)
def test_a_wrong_evaluation_is_seen(place: Path, control: str) -> None:
    spoilt, overrides = SPOILT[control]
    spec = job(place, GPT2, [*HELD_OUT, *overrides, ONE_STEP])
    (_, right, _), (_, wrong, _) = (run_engine(spec, before).evaluations[0] for before in (lambda: None, spoilt))
    assert abs(wrong - right) > WRONG


def written(place: Path, name: str, model: str, *overrides: str) -> tuple[list[dict[str, Any]], dict[str, bytes]]:
    """What a run wrote: the numbers of all steps, and every tensor file of its checkpoint."""
    run = trained_run(job(place, model, [*LAYOUTS[name], DROPOUT, 'train.precision="fp32"', *overrides]))
    shown = ("step", "loss", "grad_norm", "tokens", "label_tokens")
    steps = [{key: line[key] for key in shown} for line in read_lines(run.metrics)]
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None
    files = {path.name: path.read_bytes() for path in sorted(newest.glob("*.safetensors"))}
    assert steps and files
    return steps, files


@planted(Pipeline, "evaluate")
def a_changed_parameter(evaluate: Any, line: Pipeline, work: Any) -> Any:
    next(iter(line.data.units.values())).master.mul_(1 + 1e-5)
    return evaluate(line, work)


UNCHANGED = {"tp2 pp2 dp2 zero1 zero_bubble_v": LLAMA, "dp2 zero3": exact.TIED}


@pytest.mark.parametrize("name", cases(
    dict.fromkeys([*UNCHANGED, *(each for each in exact.COVER if each.startswith(("tp2", "dp", "pp2 dp")))]), UNCHANGED))
def test_training_is_the_same_with_and_without_evaluations(place: Path, name: str) -> None:
    model = UNCHANGED.get(name, GPT2)
    assert written(place, name, model, *EVERY) == written(place, name, model, "train.steps=2")


def test_an_evaluation_that_changes_a_parameter_is_seen(place: Path) -> None:
    def spoilt(*overrides: str) -> Any:
        return run_engine(job(place, GPT2, overrides), a_changed_parameter)

    assert spoilt(*EVERY).distance(spoilt("train.steps=2")) > WRONG


@planted(evaluation.Evaluator, "_say")
def killed_after_its_evaluation(say: Any, evaluator: evaluation.Evaluator, found: Any) -> None:
    say(evaluator, found)
    raise RuntimeError("planted")


@planted(evaluation.Evaluator, "_own")
def stopped_in_its_last_evaluation(share: Any, evaluator: evaluation.Evaluator, step: int, mine: Any) -> Any:
    if step == 3:
        os.kill(os.getpid(), signal.SIGTERM)
    return share(evaluator, step, mine)


@pytest.mark.parametrize(("broken_off", "code", "left", "saved"), [
    (killed_after_its_evaluation, 1, [2], 1), (stopped_in_its_last_evaluation, EXIT_STOPPED, [2], 3)])
def test_a_resume_on_another_layout_gives_the_same_evaluations(place: Path, reference: Reference, broken_off: Callable[[], None],
                                                               code: int, left: list[int], saved: int) -> None:
    """Killed after the first evaluation and before its checkpoint: that evaluation is cut away and made again. Asked to stop in
    the last one: it is put off, the state is saved, and the run is not complete before it has been made."""
    each = list(HELD_OUT)
    spec = job(place, LLAMA, [*each, "checkpoint.every=1", *LAYOUTS["tp2"]])
    run = start(spec)
    assert exit_codes(2, run.job, broken_off) == [code] * 2
    assert [line["step"] for line in read_lines(run.evaluations)] == left
    assert complete_steps(run.checkpoints)[-1].name == f"step-{saved:08d}" and not complete(run, spec)
    check_evaluations(relaunch(run, place, LLAMA, [*each, *LAYOUTS["pp2 dp2 zero2 breadth_first"]]), reference(LLAMA, *HELD_OUT))
    assert complete(run, spec)
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3]
    assert ("is put off: asked to by SIGTERM" in run.main_log.read_text()) == (code == EXIT_STOPPED)


def test_each_row_is_one_replicas_in_equally_many_passes() -> None:
    for rows, microbatch, microbatches, degree in product((1, 5, 12, 13), (1, 3), (1, 2), (1, 2, 3)):
        shared = [passes(rows, microbatch=microbatch, microbatches=microbatches, data_degree=degree, data_rank=rank)
                  for rank in range(degree)]
        assert len({len(each) for each in shared}) == 1
        assert {len(each) for replica in shared for each in replica} == {microbatches}
        found = sorted(row for replica in shared for each in replica for rows_ in each for row in rows_)
        assert found == list(range(len(found))) and rows <= len(found) < rows + microbatch * microbatches * degree


def held_out_text(place: Path, tmp_path: Path, text: str) -> HeldOut:
    (tmp_path / "few.txt").write_text(text)
    spec = job(place, GPT2, [f'evaluate.files=["{tmp_path}/few.txt"]'])
    found = prepare_held_out(spec, 307, place / "cache", quiet, prepare_job(spec, 307, place / "cache", quiet))
    assert found is not None
    return HeldOut(found, 24)


def test_text_shorter_than_a_sample_is_filled_with_labels_that_do_not_count(place: Path, tmp_path: Path) -> None:
    rows = held_out_text(place, tmp_path, "def")
    ids, labels = rows.batch(range(0, 2))
    counted = int((labels != IGNORE).sum())
    assert len(rows) == 1 and ids.shape == labels.shape == (2, 24) and 1 <= counted < 24
    assert (labels[0, :counted - 1] == ids[0, 1:counted]).all() and (labels.flatten()[counted:] == IGNORE).all()


@pytest.mark.parametrize(("text", "rule"), [("", "give no token"), ("\0\0", "is binary")])
def test_text_without_a_loss_is_refused(place: Path, tmp_path: Path, text: str, rule: str) -> None:
    with pytest.raises(HpcMpError, match=f"evaluate.files.*{rule}"):
        held_out_text(place, tmp_path, text)


def test_one_token_alone_is_refused(tmp_path: Path) -> None:
    (tmp_path / "tokens.bin").write_bytes(b"\1\0")
    with pytest.raises(HpcMpError, match=r"evaluate.files \(1 tokens\): holds no token whose loss"):
        HeldOut(TokenSet(tmp_path, 1, "uint16", tmp_path, "", False, (1,)), 24)


def test_text_that_is_trained_on_too_is_named(place: Path, caplog: pytest.LogCaptureFixture) -> None:
    spec = job(place, GPT2, ['evaluate.files=["*.jsonl"]'])
    prepare_held_out(spec, 307, place / "cache", quiet, prepare_job(spec, 307, place / "cache", quiet))
    assert [message for message in caplog.messages if "text.jsonl" in message and "held-out.jsonl" not in message]


RISING = (*EVERY, "train.steps=4", "train.learning_rate=3.0", "checkpoint.every=1", "checkpoint.keep=1")


best_forgotten = wrapped(retention, "best_checkpoint", lambda best: lambda run: None)


@pytest.mark.parametrize("spoilt", [False, True])
def test_the_best_checkpoint_stays_and_is_exported(place: Path, tmp_path: Path, spoilt: bool) -> None:
    """A rate that is far too high: the loss on held-out text rises, and the best checkpoint is none of the newest."""
    run = trained_run(job(place, GPT2, RISING), best_forgotten if spoilt else lambda: None)
    losses = {line["step"]: line["loss"] for line in read_lines(run.evaluations)}
    best = min(losses, key=lambda step: losses[step])
    assert list(losses) == [1, 2, 3, 4] and best < 4, losses
    assert [step_of(path) for path in complete_steps(run.checkpoints)] == ([4] if spoilt else [best, 4])
    if not spoilt:
        found = CliRunner().invoke(export, [str(run.path), "--best", "--output", str(tmp_path / "model"), "--json"])
        assert found.exit_code == 0 and json.loads(found.stdout)["step"] == best
        both = CliRunner().invoke(export, [str(run.path), "--best", "--step", "4", "--output", str(tmp_path / "other")])
        assert isinstance(both.exception, HpcMpError) and "--best --step 4" in str(both.exception)
        run.evaluations.unlink()
        none = CliRunner().invoke(export, [str(run.path), "--best", "--output", str(tmp_path / "other")])
        assert isinstance(none.exception, HpcMpError) and "was evaluated" in str(none.exception)
