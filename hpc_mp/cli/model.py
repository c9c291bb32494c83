"""``hpc-mp model``: what a model is, how it is cut, and which degrees are possible; and the list of all types."""

import json
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.console import Console
from rich.table import Table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.views import view
from hpc_mp.job import load_job
from hpc_mp.job.layout import whole_config
from hpc_mp.layout.models.description import ModelDescription, describe
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.layout.models.shape import MOST, TEXT_PART, config_of, text_part
from hpc_mp.layout.models.types import proved_with, verdicts


@click.command(help="Show what a model is: its size, the kinds of its layers, how it is cut, and which degrees are possible.\n\n"
                    "MODEL is the directory of a checkpoint, a config.json, a job file, or a type (with transformers' defaults).")
@click.argument("model", required=False)
@click.option("--list", "all_types", is_flag=True, help="Show all types: which are verified, and why others are refused.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(model: str | None, all_types: bool, as_json: bool) -> None:
    if (model is None) != all_types:
        raise HpcMpError("hpc-mp model", "takes either MODEL or --list", "name one of them")
    if model is None:
        _list(as_json)
        return
    config, checkpoint = configuration(model)
    description = describe(model_shape(text_part(config), checkpoint))
    if as_json:
        click.echo(json.dumps(asdict(description)))
    else:
        whole = config["model_type"]
        Console().print(picture(description, "" if whole == description.model_type else TEXT_PART.format(whole=whole)))


def _list(as_json: bool) -> None:
    if as_json:
        click.echo(json.dumps({"transformers": proved_with(), "types": [asdict(verdict) for verdict in verdicts()]}))
        return
    table = Table("type", "", f"with transformers {proved_with()}", box=None, pad_edge=False)
    for verdict in verdicts():
        source = "by a table" if verdict.table else "as read from its code"
        table.add_row(verdict.model_type, "✓" if verdict.verified else "–", verdict.reason or source)
    Console().print(table)


def configuration(model: str) -> tuple[dict[str, Any], str | None]:
    """Return a configuration, and the checkpoint that it comes from. Raises HpcMpError if it cannot be read."""
    path = Path(model)
    if path.is_dir():
        return config_of(path), model
    if path.suffix == ".toml":
        spec = load_job(path)
        return whole_config(spec), spec.model.pretrained
    if not path.is_file():
        if path.suffix or len(path.parts) > 1:
            raise HpcMpError(f"MODEL = {model}", "does not exist",
                             "name a checkpoint's directory, a config.json, a job file or a type")
        return {"model_type": model}, None
    try:
        config = json.loads(path.read_text(encoding="utf-8"))
    except ValueError as error:
        raise HpcMpError(f"MODEL = {model}", f"is not JSON ({error})", "name a config.json of Hugging Face") from None
    if not isinstance(config, dict) or not isinstance(config.get("model_type"), str):
        raise HpcMpError(f"MODEL = {model}", "names no model_type", "name a config.json of Hugging Face")
    return config, model


def picture(model: ModelDescription, part: str) -> Table:
    """Return the description as a table. ``part``: what the model is a part of."""
    table = Table(show_header=False, box=None, pad_edge=False)
    for line in view("cli/model.txt.j2", billions=billions, MOST=MOST).rows(model, part).splitlines():
        name, _, text = line.partition("|")
        if text:
            table.add_row(f"{name}  " if name else "", text)
    return table


def billions(number: int) -> str:
    """Return a number of parameters with three digits."""
    for unit, size in (("B", 10**9), ("M", 10**6), ("k", 10**3)):
        if number >= size:
            return f"{number / size:.3g} {unit}"
    return str(number)
