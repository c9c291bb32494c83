"""``hpc-mp plan``: whether a training fits, how fast it is, and the layout for it."""

import json
import time
import tomllib
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.views import view
from hpc_mp.cli.model import configuration
from hpc_mp.cli.output import number_table, terminal, write_new
from hpc_mp.job import AnySpec, JobSpec, dump_job, load_sweep
from hpc_mp.job.layout import read_shape
from hpc_mp.job.parallel import Parallel
from hpc_mp.job.values import toml_value
from hpc_mp.layout.models.shape import text_part
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.search import KEYS, Question, larger, remedies, search
from hpc_mp.report.plan_page import write_plan_page

BATCH, TOKENS = 512, 8192  # samples of a step, and tokens of one: four million, as Llama 2 was trained with (arXiv:2307.09288)
KEY_OF = {"nodes": "job.nodes", "sequence": "data.sequence_length", "global_batch": "train.global_batch", "precision": "train.precision"}


@click.command(help="Show whether a training fits, how fast it is, and the best layout: what [parallel] of the job file does not "
                    "state is chosen. In place of a job file: --model.")
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="A checkpoint's directory, a config.json or a type.")
@click.option("--machine", metavar="NAME", help="A machine or a GPU of the catalogue: ndv5, H100. Default: slurm.gpu_type.")
@click.option("--cluster", metavar="NAME:NODES", help="The machine, and the number of nodes.")
@click.option("--nodes", type=int, help="Default: the job file's, else the fewest that fit.")
@click.option("--sequence", type=int, help=f"Tokens of a sample. Default with --model: {TOKENS}.")
@click.option("--global-batch", type=int, help=f"Samples of a step. Default with --model: {BATCH}.")
@click.option("--precision", help="Default with --model: bf16.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job: --set parallel.zero=3.")
@click.option("--goal", type=click.Choice(["speed", "gpus", "memory"]), default="speed", show_default=True,
              help="The most tokens per second, the fewest GPUs, or the least memory.")
@click.option("--explain", is_flag=True, help="Show all parts of memory and time, and what other hardware would change.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the job. With --model: --set data.files and train.steps.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(job: Path | None, model: str | None, machine: str | None, cluster: str | None, overrides: tuple[str, ...], goal: str,
            explain: bool, write: Path | None, page: Path | None, as_json: bool, **given: int | str | None) -> None:
    name, _, nodes = (cluster or machine or "").partition(":")
    given = given | ({"nodes": nodes} if nodes else {})
    overrides = (*(f"{KEY_OF[option]}={value}" for option, value in given.items() if value is not None), *overrides)
    question, sized = _question(job, model, name, overrides, goal)
    words = view("cli/plan.txt.j2", question=question, plain=Parallel(), keys=KEYS, toml=toml_value)
    plan = next(filter(None, map(search, [question] if sized and goal != "gpus" else larger(question))), None)
    if page is not None and (shown := plan or search(replace(question, goal="memory"))):
        write_plan_page(question, shown, page, time.time())
    if plan is None:
        least, better = search(replace(question, goal="memory")), next(filter(None, map(search, remedies(question))), None)
        raise HpcMpError(*words.refusal(least, better).strip().split("\n"))
    if write is not None:
        if model and not {"data.files", "train.steps"} <= {text.partition("=")[0] for text in overrides}:
            raise HpcMpError(f"--write {write}", "needs the data", "add --set data.files=… and --set train.steps=…")
        write_new(write, dump_job(plan.job), force=False)
    what_if = {what: search(other) for what, other in _hardware(question, plan.job).items()} if explain else {}
    if as_json:
        more = {"memory": question.machine.memory, "what_if": {what: other and asdict(other) for what, other in what_if.items()}}
        click.echo(json.dumps(asdict(plan) | more, default=lambda job: job.model_dump(mode="json")))
        return
    table = number_table("next best", "memory", "step", "why", words=["why"])
    for other in plan.others:
        table.add_row(*words.row(plan, other).strip().split("|"))
    for part in (words.text(plan), table, words.explained(plan, what_if) if explain else "", words.job(plan)):
        terminal().print(part, markup=False)


def _question(job: Path | None, model: str | None, name: str, overrides: tuple[str, ...], goal: str) -> tuple[Question, bool]:
    """Return the question, and True if the number of nodes is stated. Raises HpcMpError."""
    if (job is None) == (model is None):
        raise HpcMpError("hpc-mp plan", "takes either a job file or --model", "name one of them")
    read: list[AnySpec] = []
    tree: dict[str, Any] = {"data": {"files": ["text/*.txt"], "sequence_length": TOKENS},
                            "train": {"steps": 1, "global_batch": BATCH, "precision": "bf16"}}
    if model is not None:
        tree["model"] = {"pretrained": model} if Path(model).is_dir() else {"config": text_part(configuration(model)[0])}
    try:
        load_sweep(job or JobSpec.model_validate(tree), overrides, before_arithmetic=read.append)
    except HpcMpError:
        if not read:
            raise  # else its numbers do not divide: what is open is still to be chosen
    spec, tree = read[0], tomllib.loads(job.read_text(encoding="utf-8-sig")) if job else {}
    if not isinstance(spec, JobSpec):
        raise HpcMpError(f"job file {job}", "starts a program, which has its own layout", "name the job file of a training")
    keys = {f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict) for key in table}
    keys |= {text.partition("=")[0].strip() for text in overrides}
    machine, count = machine_named(name or spec.slurm.gpu_type or "unnamed"), spec.train.gradient_accumulation_steps
    stated = {key.partition(".")[2] for key in keys if key.startswith("parallel.")} | ({"microbatches"} if count else set())
    question = Question(spec, read_shape(spec), machine, frozenset(stated), goal)
    return question.having(**{
        "parallel.microbatches": count or spec.parallel.microbatches, "train.gradient_accumulation_steps": None,
        "job.ranks_per_node": spec.job.ranks_per_node if "job.ranks_per_node" in keys else machine.fabric.gpus}), "job.nodes" in keys


def _hardware(question: Question, job: JobSpec) -> dict[str, Question]:
    """Return the question for a plan's nodes with twice as much of one thing."""
    nodes, gpu, fabric = job.job.nodes, question.machine.gpu, question.machine.fabric
    here = replace(question, goal="speed").having(**{"job.nodes": nodes, "job.ranks_per_node": job.job.ranks_per_node})
    gpus = replace(question.machine, gpu=replace(gpu, memory_mib=2 * (gpu.memory_mib or 0)))
    links = replace(question.machine, fabric=replace(fabric, nic=2 * fabric.nic))
    return {"nodes": here.having(**{"job.nodes": 2 * nodes}), "memory of a GPU": replace(here, machine=gpus),
            "rate between nodes": replace(here, machine=links)}
