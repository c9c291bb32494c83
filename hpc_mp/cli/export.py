"""``hpc-mp export``: a run's checkpoint as a Hugging Face model directory."""

import json
import os
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_train
from hpc_mp.base.text import counted, data_size
from hpc_mp.cli.output import bytes_bar
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.retention import best_checkpoint
from hpc_mp.runs.find import find


@click.command(help="Write a run's newest complete checkpoint as a Hugging Face model directory for "
                    "AutoModelForCausalLM.from_pretrained and AutoTokenizer.from_pretrained.")
@click.argument("run", type=click.Path(path_type=Path))
@click.option("--output", required=True, type=click.Path(path_type=Path), help="Directory to write; new or empty.")
@click.option("--step", type=int, help="Export the checkpoint of this step instead of the newest.")
@click.option("--best", is_flag=True, help="Export the checkpoint that is best on held-out text, by evaluate.best.")
@click.option("--dtype", type=click.Choice(["keep", "float32", "bfloat16", "float64"]), default="keep",
              show_default=True, help="Type of the weights; keep: that of the training; bfloat16 rounds.")
@click.option("--adapters", is_flag=True, help="Write the adapters of a run with [lora] alone, in PEFT's format. Without this "
                                               "option they are merged into the model's weights.")
@click.option("--force", is_flag=True, help="Replace an existing model directory at --output.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(run: Path, output: Path, step: int | None, best: bool, dtype: str, adapters: bool, force: bool,
            as_json: bool) -> None:
    need_train("hpc-mp export")
    directory = find(run)
    step = _best(directory, step) if best else step
    os.environ["HF_HUB_OFFLINE"] = "1"  # nothing is fetched; transformers reads this when it is imported
    from hpc_mp.train.checkpoint.export import export  # imports torch
    from hpc_mp.train.checkpoint.export_adapters import export_adapters

    write = export_adapters if adapters else export
    with bytes_bar("writing") as progress:
        done = write(directory, output, step=step, dtype=dtype, force=force, progress=progress)
    for path, reason in done.skipped:
        click.echo(f"checkpoint {path.name} is skipped: {reason}", err=True)
    if done.tokenizer is None and not adapters:
        click.echo("warning: the run's tokenizer is missing in its cache and is not exported", err=True)
    if as_json:
        click.echo(json.dumps({
            "run": str(directory.path), "checkpoint": str(done.checkpoint), "step": done.step,
            "output": str(done.output), "files": done.files, "parameters": done.parameters, "bytes": done.bytes,
            "dtype": done.dtype, "tokenizer": str(done.tokenizer) if done.tokenizer else None,
            "skipped": [{"checkpoint": str(path), "reason": reason} for path, reason in done.skipped],
        }))
    else:
        click.echo(f"exported  step {done.step} of {directory.path}\n"
                   f"written   {done.output}: {done.parameters:,} parameters, {done.dtype}, "
                   f"{data_size(done.bytes)} in {counted(len(done.files), 'file')}")


def _best(run: RunDirectory, step: int | None) -> int:
    """Return the step of the best checkpoint. Raises HpcMpError."""
    if step is not None:
        raise HpcMpError(f"--best --step {step}", "select two checkpoints", "leave one of them out")
    best = best_checkpoint(run)
    if best is None:
        raise HpcMpError(f"--best of run {run.path}", "has no checkpoint that was evaluated on held-out text",
                         "select one with --step, or set evaluate.files and evaluate.every for the next run")
    return best.evaluation.step
