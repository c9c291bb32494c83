"""The training text of a job, examined before the start: every file's first row, the tokenizer, and the amount of text.

The rows of all files are checked without any library of the rank half. If that is installed, the first row is tokenized as the
ranks will do it, and existing tokens are counted.
"""

from dataclasses import asdict, dataclass, replace
from importlib.util import find_spec
from math import lcm
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import REMEDY
from hpc_mp.base.text import counted, data_size
from hpc_mp.base.views import view
from hpc_mp.job import JobSpec
from hpc_mp.job.epochs import has_a_sample_per_row, samples_in, steps_of, with_steps
from hpc_mp.job.first_rows import FirstRow, first_rows
from hpc_mp.job.inputs import find_files, find_groups, kind
from hpc_mp.job.layout import read_shape
from hpc_mp.job.tokenizer_files import check_tokenizer, find_tokenizer, has_template, missing_template
from hpc_mp.launch.listener import Listener
from hpc_mp.rundir.records import RankStatus

ROWS = ("text", "mixture", "tokenizer", "first row", "samples", "epoch", "warning", "note")
TOKEN_BYTES = 4  # for English with a vocabulary of tens of thousands, without a tokenizer to measure it


@dataclass(frozen=True, slots=True)
class TextAmount:
    """The amount of training text."""

    tokens: int  # number of tokens in all files
    exact: bool  # True if they were counted, rather than estimated from bytes
    samples: int  # whole sequences in an epoch
    steps: int  # steps of an epoch, the last one rounded up


@dataclass(frozen=True, slots=True)
class TrainingText:
    """The part of a launch's summary about a job's text.

    Attributes:
        rows: the first row of every file; ``held_out``: of the evaluated files.
        tokenizer: its directory; None if one is trained on the files.
        first_tokens: tokens of the first row, as far as examined, and the number that count in the loss; None if unknown.
            ``first_whole``: True if that is the whole row.
        amount: amount of tokens.
    """

    rows: tuple[FirstRow, ...]
    held_out: tuple[FirstRow, ...]
    tokenizer: Path | None
    first_tokens: tuple[int, int] | None
    first_whole: bool
    amount: TextAmount

    @property
    def first(self) -> FirstRow:
        """The first file that contains text, as far as examined."""
        return next((row for row in self.rows if row.parts), self.rows[0])

    def document(self) -> dict[str, Any]:
        """Return the document for ``--json``."""
        tokens, labels = self.first_tokens or (None, None)
        return {
            "files": len(self.rows), "bytes": sum(row.size for row in self.rows), "held_out_files": len(self.held_out),
            "tokenizer": None if self.tokenizer is None else str(self.tokenizer), "first_file": str(self.first.path),
            "first_row": [{"text": text, "counts": counts} for text, counts in self.first.parts], "first_row_tokens": tokens,
            "first_row_counted": labels, **asdict(self.amount)}


def check_text(spec: JobSpec, vocabulary: int) -> tuple[tuple[FirstRow, ...], tuple[FirstRow, ...], Path | None]:
    """Return the first rows of all files, of all held-out files, and the tokenizer's directory. ``vocabulary``: rows of the
    model's embedding. Raises HpcMpError if a file is missing, not text or has rows without trainable text, the text is too short
    for one sample, or a tokenizer is missing or does not fit."""
    files, key = find_files(spec.data.files), "evaluate.files"
    held_out = find_files(spec.evaluate.files, key)
    tokenizer = tokenizer_of(spec)
    check_tokenizer(tokenizer, vocabulary)
    rows = first_rows(files, form=spec.data.form)
    chats = spec.data.format in ("messages", "sharegpt", "alpaca") or any(row.chat for row in rows)
    if spec.data.template is None and chats and (tokenizer is None or not has_template(tokenizer)):
        raise missing_template(tokenizer)
    find_groups(spec.data.files, spec.data.weights)
    limit, length = sum(row.size for row in rows) + len(rows), spec.data.sequence_length  # a byte each, and the ends of texts
    if limit <= length and not has_a_sample_per_row(spec) and all(row.plain and not row.chat for row in rows):
        raise HpcMpError(f"data.sequence_length = {length}",
                         f"is more than the text has: {counted(len(rows), 'file')} with {counted(limit - len(rows), 'byte')} "
                         "give fewer tokens, and one sample takes sequence_length + 1",
                         "use more text, or a shorter sequence_length")
    return rows, first_rows(held_out, key, spec.data.form), tokenizer


def tokenizer_of(spec: JobSpec) -> Path | None:
    """Return the directory of the job's tokenizer; None if one is trained. Raises HpcMpError."""
    return find_tokenizer(Path(spec.data.tokenizer) if spec.data.tokenizer else None,
                          Path(spec.model.pretrained) if spec.model.pretrained else None)


def report_text(spec: JobSpec, vocabulary: int) -> TrainingText:
    """Return a job's text, checked as in ``check_text``, with tokens if that takes only a second or two. Raises HpcMpError."""
    rows, held_out, tokenizer = check_text(spec, vocabulary)
    size = sum(row.size for row in rows)
    if find_spec("tokenizers") is None:
        return TrainingText(rows, held_out, tokenizer, None, False, _amount(spec, size // TOKEN_BYTES))
    from hpc_mp.train.data.shown import sample
    from hpc_mp.train.data.tokens import find_prepared, reading_of

    prepared = find_prepared(spec, vocabulary, Path(spec.job.directory) / ".cache")
    source = tokenizer or (prepared.tokenizer_directory if prepared else None)
    start = next((place for place, row in enumerate(rows) if row.parts), 0)
    measured = sample([row.path for row in (*rows[start:], *rows[:start])], source, reading_of(spec)) if source else None
    if prepared is not None:
        amount = _amount(spec, prepared.count, len(prepared.documents()), exact=True)
    elif measured is not None and measured.bytes:
        tokens, rows_there = (round(size * part / measured.bytes) for part in (measured.tokens, measured.documents))
        amount = _amount(spec, tokens, rows_there)
    else:
        amount = _amount(spec, size // TOKEN_BYTES)
    first = (measured.first, measured.counted) if measured else None
    return TrainingText(rows, held_out, tokenizer, first, bool(measured and measured.whole), amount)


def _amount(spec: JobSpec, tokens: int, rows: int = 0, *, exact: bool = False) -> TextAmount:
    samples = samples_in(spec, tokens, rows)
    return TextAmount(tokens, exact, samples, steps_of(1, samples, spec.train.global_batch))


def estimated_steps(spec: JobSpec) -> JobSpec:
    """Return the job with epochs replaced by estimated steps; writes nothing. Raises HpcMpError as ``report_text``."""
    return spec if spec.train.epochs is None else with_steps(spec, report_text(spec, read_shape(spec).vocabulary).amount.samples)


def counted_steps(spec: JobSpec, listener: Listener) -> JobSpec:
    """Return the job with epochs replaced by steps. Its text is tokenized for that, unless it has been. Raises HpcMpError as
    ``report_text``, for the text itself, or if the tokenizers' library is missing."""
    if spec.train.epochs is None:
        return spec
    value, vocabulary = f"train.epochs = {spec.train.epochs:g}", read_shape(spec).vocabulary
    cache = Path(spec.job.directory) / ".cache"
    rows, _, _ = check_text(spec, vocabulary)
    if find_spec("tokenizers") is None:
        raise HpcMpError(value, "needs the tokens of the text to be counted before the start, and no tokenizer can be loaded",
                         f"set train.steps to epochs × tokens / (sequence_length × global_batch), or {REMEDY}")
    from hpc_mp.train.data.tokens import find_prepared, prepare_job

    tokens = find_prepared(spec, vocabulary, cache)
    if tokens is None:
        listener.say(f"{value}: {data_size(sum(row.size for row in rows))} are tokenized to count their samples")
        with listener.following(0):
            tokens = prepare_job(spec, vocabulary, cache, lambda done, total: listener.update(
                RankStatus(0, "preparing data", done=done, total=total), ()))
    return with_steps(spec, samples_in(spec, tokens.count, len(tokens.documents())))


def text_rows(text: TrainingText, spec: JobSpec) -> dict[str, str]:
    """Return the rows of a launch's summary on the training text."""
    words = view("launch/training_text.txt.j2", lcm=lcm, has_a_sample_per_row=has_a_sample_per_row, rough=_rough,
                 cache=Path(spec.job.directory) / ".cache", evaluated_and_trained=_evaluated_and_trained,
                 not_text=lambda rows: sum(kind(row.path) != "text" for row in rows))
    rows = {name: getattr(words, name.replace(" ", "_"))(text, spec) for name in ROWS}
    return {name: row for name, row in rows.items() if row}


def _evaluated_and_trained(text: TrainingText) -> list[Path]:
    trained = {row.path.resolve() for row in text.rows}
    return [row.path for row in text.held_out if row.path.resolve() in trained]


def _rough(amount: TextAmount) -> TextAmount:
    """Return an estimated amount, with two digits."""
    tokens, samples, steps = (round(float(f"{value:.2g}")) for value in (amount.tokens, amount.samples, amount.steps))
    return replace(amount, tokens=tokens, samples=samples, steps=steps)
