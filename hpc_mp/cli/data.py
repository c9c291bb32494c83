"""``hpc-mp data``: preparation of a job's text before an allocation, to keep GPUs from waiting for it, and a look at it."""

import json
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path

import click

from hpc_mp.base.extras import need_train
from hpc_mp.base.text import counted
from hpc_mp.cli.output import bytes_bar
from hpc_mp.job import load_job
from hpc_mp.job.epochs import samples_in, steps_of, with_steps
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_shape
from hpc_mp.launch.training_text import check_text

MARKS = "⟦", "⟧"  # around tokens that count
BETWEEN = "│"  # two tokens


@click.group(help="Tokenize a job's text before it runs, and look at it as it is trained.")
def command() -> None:
    pass


@command.command(help="Tokenize and hash the text of a job file into the cache of its runs, in which ranks find it later. "
                      "Existing tokens are reused.")
@click.argument("job", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def prepare(job: Path, overrides: tuple[str, ...], as_json: bool) -> None:
    need_train("hpc-mp data prepare")
    from hpc_mp.train.data import prepare_held_out, prepare_job  # import the tokenizers' library

    spec = load_job(job, overrides)
    vocabulary, cache = read_shape(spec).vocabulary, Path(spec.job.directory) / ".cache"
    check_text(spec, vocabulary)
    with bytes_bar("tokenizing") as progress:
        tokens = prepare_job(spec, vocabulary, cache, progress)
        held_out = prepare_held_out(spec, vocabulary, cache, progress, tokens)
    samples = samples_in(spec, tokens.count, len(tokens.documents()))
    steps = steps_of(1, samples, spec.train.global_batch)
    files = len(find_files(spec.data.files))
    if as_json:
        click.echo(json.dumps({"directory": str(tokens.directory), "tokens": tokens.count, "files": files,
                               "tokenizer": str(tokens.tokenizer_directory), "steps_per_epoch": steps,
                               "held_out": {"directory": str(held_out.directory), "tokens": held_out.count} if held_out
                               else None}))
        return
    click.echo(f"tokens     {tokens.count:,} of {counted(files, 'file')}, in {tokens.directory}\n"
               f"tokenizer  {tokens.tokenizer_directory}\n"
               f"epoch      {counted(steps, 'step')} of {spec.train.global_batch} sequences of {spec.data.sequence_length}")
    if spec.train.epochs is not None:
        click.echo(f"epochs     {spec.train.epochs:g}, or {counted(with_steps(spec, samples).train.steps, 'step')}")
    if held_out is not None:
        click.echo(f"held out   {held_out.count:,} tokens of {counted(len(find_files(spec.evaluate.files)), 'file')}, "
                   f"in {held_out.directory}")


@command.command(help="Show the first documents of each pattern in data.files as they are trained: their tokens, with those that "
                      f"count in the loss between {MARKS[0]} and {MARKS[1]}.")
@click.argument("job", type=click.Path(path_type=Path, exists=True, dir_okay=False))
@click.option("--rows", "number", type=click.IntRange(min=1), default=2, show_default=True, help="Documents of each pattern.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Override a key of the job file.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def show(job: Path, number: int, overrides: tuple[str, ...], as_json: bool) -> None:
    need_train("hpc-mp data show")
    from hpc_mp.train.data.shown import shown_documents

    spec = load_job(job, overrides)
    vocabulary = read_shape(spec).vocabulary
    check_text(spec, vocabulary)
    documents = shown_documents(spec, vocabulary, Path(spec.job.directory) / ".cache", number)
    if as_json:
        click.echo(json.dumps({"documents": [
            {"file": str(document.file), "document": document.number, "ids": document.ids, "texts": document.texts,
             "counts": document.counts, "whole": document.whole} for document in documents]}))
        return
    for document in documents:
        size = counted(len(document.ids), "token") + ("" if document.whole else " of a longer one")
        size += "" if spec.data.labels else f", of which {sum(document.counts)} count in the loss"
        click.echo(f"{document.file}, document {document.number}: {size}\n"
                   f"{marked(document.texts, document.counts)}\n")


def marked(texts: Sequence[str], counts: Sequence[bool]) -> str:
    """Return tokens as lines of text, each ended by a token that has a line end. Runs of tokens that count are between marks."""
    runs = ((count, [text.replace("\n", "⏎") + "\n" * ("\n" in text) for _, text in run])
            for count, run in groupby(zip(counts, texts, strict=True), key=lambda token: token[0]))
    return "".join(MARKS[0] * count + BETWEEN.join(run).replace(f"\n{BETWEEN}", "\n") + MARKS[1] * count for count, run in runs)
