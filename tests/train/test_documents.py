"""Documents that are separate in their samples: every layout equals one process of plain transformers that is given positions and
a block-diagonal mask, in fp64 to 1e-12; evaluations equal plain transformers on each document's part of a row by itself."""

import json
from collections.abc import Callable
from dataclasses import replace
from functools import cache
from itertools import accumulate, pairwise
from pathlib import Path
from random import Random
from typing import Any

import exact
import kernels
import pytest
import torch
from engines import quiet, run_engine
from exact import EXACT, GPT2, GPTJ, LLAMA, MIXTRAL, ONE_STEP, WRONG, Engine, Plain, Reference, Trained, cases
from layouts import Result, job, layout, prepare, run_whole, trained_run
from plain import plain_model
from planting import frequencies_of_own_positions, planted, wrapped
from ranks import run_ranks
from token_files import words

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec
from hpc_mp.rundir import read_lines
from hpc_mp.train.data import IGNORE, Samples, prepare_job
from hpc_mp.train.data.rows import TokenRows
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.model import transformers_stage
from hpc_mp.train.parallel import context, flash, masks, ring_attention
from hpc_mp.train.parallel.masks import begins_of

SEPARATE = ('data.documents="separate"', 'data.tokenizer="words"')
LENGTH = 24
# Tokens of documents: single ones, one that is a sample, one that is two, some that begin and end inside samples; after seven
# more the next round stands elsewhere in its samples.
LENGTHS = (1, 1, 5, 17, 24, 48, 3, 1, 20, 2, 70, 23, 25, 7) * 9
HELD_OUT_LENGTHS = (9, 1, 40, 24, 1, 3)


def write_rows(path: Path, lengths: tuple[int, ...]) -> None:
    """A word is a token. The first half of every third row is a prompt."""
    random, rows = Random(len(lengths)), []
    for number, length in enumerate(lengths):
        text = [f"w{int(300 * random.random() ** 4)}" for _ in range(length)]  # some words are frequent
        cut = length // 2
        prompted = {"prompt": " ".join(text[:cut]), "completion": " ".join(text[cut:])}
        rows.append({"text": " ".join(text)} if number % 3 else prompted)
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("documents")
    write_rows(directory / "text.jsonl", LENGTHS)
    write_rows(directory / "held-out.jsonl", HELD_OUT_LENGTHS)
    words(directory / "words", ["?", *(f"w{number}" for number in range(300))])  # without a token that ends documents
    return directory


@pytest.fixture(scope="module")
def separate(place: Path, trained: Trained) -> Engine:
    """``separate(model, *overrides)``: the engine with separate documents; computed once."""
    return lambda model, *overrides: trained(job(place, model, [*SEPARATE, *overrides]))


@pytest.fixture(scope="module")
def expected(place: Path, separate: Engine, plain: Plain) -> Reference:
    """``expected(model)``: the result of plain transformers with separate documents."""

    @cache
    def compute(model: str) -> Result:
        one, found = separate(model), plain(job(place, model, SEPARATE), documents=LENGTHS)
        assert found.losses[0] - found.losses[-1] > 1e-3, "the model must move, or nothing is shown"
        assert one.distance(found) < EXACT
        return found

    return compute


# --- every layout ----------------------------------------------------------------------------------------------------

MORE = {
    "full": layout(microbatches=2, recompute='"full"'),
    "selective": layout(microbatches=2, recompute='"selective"'),
    "cp2 ulysses selective": layout(context=2, context_method='"ulysses"', recompute='"selective"'),
    "pp2 every-2 zero_bubble": layout(pipeline=2, microbatches=3, recompute='"every-2"', schedule="zero_bubble"),
    "pp2 offload": layout(pipeline=2, microbatches=4, offload=["activations"], offload_horizon=0),
    "pp2 full offload": layout(pipeline=2, microbatches=4, recompute='"full"', offload=["activations"], offload_horizon=0),
}
LAID_OUT = {name: exact.LAYOUTS[name] for name in (
    "tp2", "pp2 1f1b M3", "pp2 zero_bubble M3", "pp2 zero_bubble_v M4", "pp2 layers 0+5", "dp2 zero3", "sp2", "sp2 dp2 zero3",
    "tp2 pp2 dp2 zero3", "tp2 pp2 dp2 zero2 interleaved_1f1b", "cp2 ring", "cp4 ring", "cp2 ulysses", "cp8 ulysses",
    "tp2 cp2 ulysses", "sp2 cp2 ring zero2", "dp2 cp2 zero3", "pp2 cp2 ring zero_bubble", "ep2 zero2",
    "pp2 ep2 zero3 zero_bubble_v",
)} | MORE
QUICK = {
    (GPT2, "sp2 dp2 zero3"), (GPT2, "cp2 ring"), (LLAMA, "pp2 zero_bubble M3"), (LLAMA, "cp2 ulysses"), (GPTJ, "pp2 1f1b M3"),
    (MIXTRAL, "tp2"), (MIXTRAL, "pp2 full offload"),
}


@pytest.mark.parametrize(("model", "name"), cases((
    (model, name) for model in (GPT2, GPTJ, LLAMA, exact.TIED, MIXTRAL, "qwen2") for name in LAID_OUT
    if model == MIXTRAL or "ep2" not in name), QUICK))
def test_separate_documents_equal_plain_transformers(separate: Engine, expected: Reference, model: str, name: str) -> None:
    assert separate(model, *LAID_OUT[name]).distance(expected(model)) < EXACT


@pytest.mark.prove
@pytest.mark.parametrize(("model", "name"), [
    (LLAMA, "cp4 ring"), (GPT2, "cp2 ulysses"), (MIXTRAL, "tp2"), (GPTJ, "pp2 1f1b M3"), (GPT2, "full"), (LLAMA, "selective")])
def test_separate_documents_with_dropout_are_the_same_on_all_layouts(separate: Engine, model: str, name: str) -> None:
    drops = "train.dropout=0.2"
    assert separate(model, drops, *LAID_OUT[name]).distance(separate(model, drops)) < EXACT


def in_blocks() -> None:
    masks.QUERIES = 7


def by_the_kernel() -> None:
    flash.computes_documents, flash.ATEN = lambda query: True, kernels  # type: ignore[assignment]


WAYS = {"blocks of queries": in_blocks, "sequences of several lengths": by_the_kernel}


@pytest.mark.parametrize(("model", "name", "way"), cases(
    [(model, name, way) for model, name in ((MIXTRAL, "tp2"), (LLAMA, "cp2 ulysses"), (GPT2, "selective"), (GPTJ, "full"),
                                            (LLAMA, "pp2 full offload"), (MIXTRAL, "sp2 dp2 zero3")) for way in WAYS],
    [(MIXTRAL, "tp2", way) for way in WAYS]))
def test_samples_too_long_for_a_mask_equal_plain_transformers(place: Path, expected: Reference, model: str, name: str,
                                                              way: str) -> None:
    """In blocks of seven queries; and as a GPU's kernel is called, here one of plain products."""
    result = run_engine(job(place, model, [*SEPARATE, *LAID_OUT[name]]), before=WAYS[way])
    assert result.distance(expected(model)) < EXACT


@pytest.mark.parametrize("name", cases(("pp2 1f1b M3", "sp2 cp2 ring zero2"), ("pp2 1f1b M3",)))
def test_16_bits_are_near(separate: Engine, name: str) -> None:
    """Masks have the format that computes."""
    whole = separate(LLAMA)
    assert separate(LLAMA, *LAID_OUT[name], 'train.precision="bf16"').losses == pytest.approx(whole.losses, abs=3e-3)


CHOSEN = [(f"{model} with longrope", name) for model in (LLAMA, "qwen2", MIXTRAL)
          for name in ("24 microbatches", "pp2 24 microbatches", "cp2 ring", "cp2 ulysses")]


@pytest.mark.parametrize(("model", "name"), cases(CHOSEN, (CHOSEN[0], CHOSEN[-2])))
def test_short_documents_get_the_frequencies_of_whole_samples(separate: Engine, expected: Reference, model: str,
                                                              name: str) -> None:
    """A step has documents of whole samples, by which transformers chooses; most microbatches have none."""
    found = separate(model, *LAID_OUT.get(name) or layout(pipeline=2 if "pp2" in name else 1, microbatches=24))
    assert found.distance(expected(model)) < EXACT


positions_that_run_on = wrapped(transformers_stage, "restarted", lambda restarted: lambda positions, begins: restarted(
    positions, None))
# Rotary positions count by their differences alone, so that it is all the same to attention where a document begins; two tokens
# at a place are seen.
positions_that_stand_still = wrapped(transformers_stage, "restarted", lambda restarted: lambda positions, begins: restarted(
    positions, begins) // 2)


# The first token of a document is seen by none but itself.
begins_one_too_far = wrapped(transformers_stage, "first_seen", lambda seen: lambda begins, window, positions: torch.minimum(
    seen(begins, window, positions) + 1, positions))
no_mask = wrapped(transformers_stage, "first_seen", lambda seen: lambda begins, window, positions: None)
a_ring_without_documents = wrapped(context, "ring_attention", lambda attend: lambda *states: attend(
    *states[:-1], replace(states[-1], first=None)))


@planted(TokenRows, "_counts")
def labels_of_other_documents(counts: Any, rows: TokenRows, first: int, length: int) -> Any:
    apart, rows._documents = rows._documents, None
    try:
        return counts(rows, first, length)
    finally:
        rows._documents = apart


@planted(ring_attention, "_scores")
def a_ring_that_masks_its_own_part_alone(scores: Any, queries: Any, key: Any, block: Any, ring: Any) -> Any:
    return scores(queries, key, block, ring if block.diagonal else replace(ring, first=None))


CONTROLS: dict[str, tuple[str, str, Callable[[], None]]] = {
    "positions do not restart (learned)": (GPT2, "sp2 dp2 zero3", positions_that_run_on),
    "two tokens at a place (rotary)": (LLAMA, "pp2 zero_bubble M3", positions_that_stand_still),
    "two tokens at a place (looked up)": (GPTJ, "pp2 1f1b M3", positions_that_stand_still),
    "no mask": (LLAMA, "cp2 ulysses", no_mask),
    "no mask of documents in a window": (MIXTRAL, "tp2", no_mask),
    "a document's first token is hidden": (GPT2, "sp2 dp2 zero3", begins_one_too_far),
    "labels across documents count": (MIXTRAL, "tp2", labels_of_other_documents),
    "a ring knows no documents": (GPT2, "cp2 ring", a_ring_without_documents),
    "frequencies of a rank's own positions": ("llama with longrope", "cp2 ring", frequencies_of_own_positions),
    "a ring sees other ranks' documents": (GPT2, "cp2 ring", a_ring_that_masks_its_own_part_alone),
}
QUICK_CONTROLS = {"positions do not restart (learned)", "no mask", "labels across documents count",
                  "a ring sees other ranks' documents"}


@pytest.mark.parametrize("control", cases(CONTROLS, QUICK_CONTROLS))
def test_what_is_wrong_is_seen(place: Path, plain: Plain, control: str) -> None:
    model, name, sabotage = CONTROLS[control]
    broken = run_engine(job(place, model, [*SEPARATE, *LAID_OUT[name], ONE_STEP]), before=sabotage)
    assert broken.distance(plain(job(place, model, [*SEPARATE, ONE_STEP]), documents=LENGTHS)) > WRONG


def test_joined_documents_are_another_training(place: Path, trained: Trained, expected: Reference) -> None:
    assert trained(job(place, GPT2, SEPARATE[1:])).distance(expected(GPT2)) > WRONG


# --- evaluation ------------------------------------------------------------------------------------------------------

def alone(spec: JobSpec, checkpoint: Path) -> float:
    """The mean loss of the held-out text, each document's part of a row computed by itself."""
    torch.set_num_threads(1)
    model = plain_model(spec, checkpoint)
    rows = [json.loads(line) for line in (Path(spec.data.files[0]).parent / "held-out.jsonl").read_text().splitlines()]
    total, count, first = torch.zeros((), dtype=torch.float64), 0, 0
    for row in rows:
        prompt, text = (row.get(key, "").split() for key in ("prompt", "text"))
        ids = torch.tensor([int(word[1:]) + 1 for word in [*prompt, *text, *row.get("completion", "").split()]])
        labels = ids.where(torch.arange(len(ids)) >= len(prompt), IGNORE)
        cuts = [0, *(cut for cut in range(1, len(ids)) if (first + cut) % LENGTH == 0), len(ids)]
        for begin, end in pairwise(cuts):
            with StaysDouble(), torch.no_grad():
                logits = model(ids[None, begin:end]).logits[0]
            wanted = labels[begin + 1:end + 1]  # the last one's label may be the first token of the next row
            total += torch.nn.functional.cross_entropy(logits[:len(wanted)], wanted, ignore_index=IGNORE, reduction="sum")
            count += int((wanted != IGNORE).sum())
        first += len(ids)
    return float(total) / count


@pytest.mark.parametrize(("model", "name"), cases(
    ((MIXTRAL, "pp2 1f1b M3"), (GPT2, "cp2 ring"), (LLAMA, "cp2 ulysses"), (GPTJ, "tp2"), (LLAMA, "tp2 pp2 dp2 zero3")),
    ((MIXTRAL, "pp2 1f1b M3"),)))
def test_an_evaluation_equals_documents_by_themselves(place: Path, model: str, name: str) -> None:
    run = trained_run(job(place, model, [*SEPARATE, *exact.HELD_OUT, ONE_STEP, *LAID_OUT[name]]))
    (line,) = read_lines(run.evaluations)
    (found,) = run_ranks(1, alone, job(place, model, SEPARATE), run.checkpoint(1))
    assert line["loss"] == pytest.approx(found, abs=EXACT, rel=0)


# --- samples ---------------------------------------------------------------------------------------------------------

def test_samples_are_what_the_rows_of_a_file_say(place: Path) -> None:
    """Ids, labels and where documents begin, of a whole epoch, from the words of the file."""
    tokens_of = prepare_job(job(place, GPT2, SEPARATE), 307, place / "cache", quiet)
    joined, apart = (Samples(tokens_of, LENGTH, 7, each) for each in ("joined", "separate"))
    rows = [json.loads(line) for line in (place / "text.jsonl").read_text().splitlines()]
    texts = [[*((word, False) for word in row.get("prompt", "").split()),
              *((word, True) for key in ("text", "completion") for word in row.get(key, "").split())] for row in rows]
    assert [len(text) for text in texts] == list(LENGTHS)
    tokens = [(int(word[1:]) + 1, counts, place) for text in texts for place, (word, counts) in enumerate(text)]
    shapes = set()
    for position in range(len(apart)):
        first = apart.first_token(position)
        window = tokens[first:first + LENGTH + 1]
        (ids,), (labels,) = apart.batch([position])
        documents = apart.documents([position])
        assert documents is not None
        begins = begins_of(torch.from_numpy(documents), torch.arange(LENGTH))
        assert ids.tolist() == [token for token, _, _ in window[:-1]] == joined.at(position)[0].tolist()
        assert labels.tolist() == [token if counts and place else IGNORE for token, counts, place in window[1:]]
        assert joined.at(position)[1].tolist() == [token if counts else IGNORE for token, counts, _ in window[1:]]
        assert begins[0].tolist() == [max(0, at - place) for at, (_, _, place) in enumerate(window[:-1])]
        assert apart.label_count([position]) == int((labels != IGNORE).sum())
        shapes |= {(begin, int((begins[0] == begin).sum())) for begin in begins[0].tolist()}
    assert {length for _, length in shapes} >= {1, LENGTH} and len(shapes) > 20, "documents of many lengths at many places"
    assert (0, 1) in shapes and (LENGTH - 1, 1) in shapes, "the end of one alone, and the beginning of one"
    assert joined.documents(range(3)) is None and list(accumulate(LENGTHS))[-1] == len(tokens)


# --- what it is bound to ---------------------------------------------------------------------------------------------

def test_a_run_keeps_what_it_began_with(place: Path) -> None:
    """Its own checkpoint is refused; another run may begin with it, and says what is different."""
    run = trained_run(job(place, GPT2, [*SEPARATE, *("train.steps=1", "checkpoint.every=1")]))
    changed = job(place, GPT2, [SEPARATE[1], "train.steps=2"])
    prepare(changed, run)
    with pytest.raises(AssertionError, match="was trained with documents = 'separate', but this job has 'joined'"):
        run_whole(changed, run=run)
    begun = trained_run(job(place, GPT2, [SEPARATE[1], "train.steps=2", f'checkpoint.resume="{run.path}"']))
    assert "documents were separate there, and are joined from now on" in begun.main_log.read_text()


def test_another_word_is_refused(place: Path) -> None:
    with pytest.raises(HpcMpError, match=r"data\.documents"):
        job(place, GPT2, ['data.documents="packed"'])
