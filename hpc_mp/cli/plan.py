"""``hpc-mp plan``: whether a training fits, how fast it is, and the layout for it."""

import json
import time
import tomllib
from collections.abc import Iterable
from dataclasses import asdict, replace
from operator import attrgetter
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.views import view
from hpc_mp.cli.model import configuration
from hpc_mp.cli.output import terminal, write_new
from hpc_mp.job import AnySpec, JobSpec, dump_job, load_sweep
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.job.parallel import Parallel
from hpc_mp.job.values import toml_value
from hpc_mp.layout.models.shape import text_part
from hpc_mp.planner.foreign import OURS, layout_settings, read_foreign
from hpc_mp.planner.foreign_plan import better, question_of
from hpc_mp.planner.machine import machine_named
from hpc_mp.planner.question import KEYS, Question, larger, remedies
from hpc_mp.planner.search import Plan, search
from hpc_mp.planner.step import step_time
from hpc_mp.report.plan_page import write_plan_page

PLACEHOLDERS = {  # with --model; a step has four million tokens, as in the training of Llama 2 (arXiv:2307.09288)
    "data": {"files": ["text/*.txt"], "sequence_length": 8192},
    "train": {"steps": 1, "global_batch": 512, "precision": "bf16"}}


@click.command(help="Show whether a training fits, how fast it is, and the best layout. What [parallel] of the job file states "
                    "holds, all else is chosen. In place of a job file: --model.")
@click.argument("job", required=False, type=click.Path(path_type=Path))
@click.option("--model", metavar="MODEL", help="A checkpoint's directory, a config.json or a type.")
@click.option("--from", "source", type=click.Path(path_type=Path), metavar="FILE",
              help="A configuration of DeepSpeed, Megatron-LM, NeMo, transformers or accelerate to plan, and to improve.")
@click.option("--machine", metavar="NAME", help="A machine or a GPU of the catalogue: ndv5, H100. Default: slurm.gpu_type.")
@click.option("--cluster", metavar="NAME:NODES", help="The machine, and the number of nodes.")
@click.option("--nodes", type=int, help="Default: the job file's, else the fewest that fit.")
@click.option("--sequence", type=int, help="Tokens of a sample. Default with --model: 8192.")
@click.option("--global-batch", type=int, help="Samples of a step. Default with --model: 512.")
@click.option("--precision", help="Default with --model: bf16.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE", help="Set a key of the job: --set parallel.zero=3.")
@click.option("--goal", type=click.Choice(["speed", "gpus", "memory"]), default="speed", show_default=True,
              help="The most tokens per second, the fewest GPUs, or the least memory.")
@click.option("--explain", is_flag=True, help="Show all parts of memory and time, and what other hardware would change.")
@click.option("--write", type=click.Path(path_type=Path), help="Write the job with its layout as a job file.")
@click.option("--force", is_flag=True, help="Replace the file of --write if it exists.")
@click.option("--html", "page", type=click.Path(path_type=Path), metavar="FILE", help="Also write a page with figures.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def command(job: Path | None, model: str | None, source: Path | None, machine: str | None, cluster: str | None,
            nodes: int | None, goal: str, sequence: int | None, global_batch: int | None, precision: str | None,
            overrides: tuple[str, ...], explain: bool, write: Path | None, force: bool, page: Path | None, as_json: bool) -> None:
    name, _, number = (cluster or machine or "").partition(":")
    keys = {"job.nodes": number or nodes, "data.sequence_length": sequence, "train.global_batch": global_batch,
            "train.precision": precision}
    overrides = (*(f"{key}={value}" for key, value in keys.items() if value is not None), *overrides)
    question, sized = _question(job, model, name, overrides, goal)
    words = view("cli/plan.txt.j2", question=question, plain=Parallel(), keys=KEYS, toml=toml_value)
    if source is not None:
        if job is not None or not sized or goal != "speed":
            raise HpcMpError(f"--from {source}", "is planned for the fastest step of a model on given nodes",
                             "add --model and --nodes, and leave out a job file and other goals")
        _plan_from(source, question, overrides, explain, write, force, page, as_json)
        return
    plan = next(filter(None, map(search, [question] if sized and goal != "gpus" else larger(question))), None)
    shown = plan or search(replace(question, goal="memory"))
    if page is not None and shown:
        write_plan_page(question, shown, page, time.time())
    if plan is None:
        better = next(filter(None, map(search, remedies(question))), None)
        raise HpcMpError(*words.refusal(shown, better).strip().split("\n"))
    if write is not None:
        write_new(write, dump_job(plan.job), force)
    what_if = {what: search(other) for what, other in _hardware(question, plan.job).items()} if explain else {}
    if as_json:
        more = {what: other and asdict(replace(other, tried=())) for what, other in what_if.items()}
        document = asdict(replace(plan, tried=())) | {"memory": question.machine.memory, "what_if": more}
        click.echo(json.dumps(document, default=lambda job: job.model_dump(mode="json")))
        return
    for part in (words.text(plan), words.next(plan), words.explained(plan, what_if) if explain else "", words.job(plan)):
        terminal().print(part, markup=False, end="")


def _question(job: Path | None, model: str | None, name: str, overrides: tuple[str, ...], goal: str) -> tuple[Question, bool]:
    """Return the question, and True if the number of nodes is stated. Raises HpcMpError."""
    if (job is None) == (model is None):
        raise HpcMpError("hpc-mp plan", "takes either a job file or --model", "name one of them")
    read: list[AnySpec] = []
    if model is not None:
        value = {"pretrained": model} if Path(model).is_dir() else {"config": text_part(configuration(model)[0])}
    try:
        load_sweep(job or JobSpec.model_validate({**PLACEHOLDERS, "model": value}), overrides, before_arithmetic=read.append)
    except HpcMpError:
        if not read:
            raise  # else its numbers do not divide: what is open is still to be chosen
    spec, tree = read[0], tomllib.loads(job.read_text(encoding="utf-8-sig")) if job else {}
    if not isinstance(spec, JobSpec):
        raise HpcMpError(f"job file {job}", "starts a program, which has its own layout", "name the job file of a training")
    stated = {f"{section}.{key}" for section, table in tree.items() if isinstance(table, dict) for key in table}
    stated |= {text.partition("=")[0].strip() for text in overrides}
    machine, count = machine_named(name or spec.slurm.gpu_type or "unnamed"), spec.train.gradient_accumulation_steps
    keys = {key.partition(".")[2] for key in stated if key.startswith("parallel.")} | ({"microbatches"} if count else set())
    values = {"parallel.microbatches": count or spec.parallel.microbatches, "train.gradient_accumulation_steps": None,
              "job.ranks_per_node": spec.job.ranks_per_node if "job.ranks_per_node" in stated else machine.fabric.gpus}
    return Question(spec, read_shape(spec), machine, frozenset(keys), goal).having(**values), "job.nodes" in stated


def _plan_from(source: Path, base: Question, overrides: Iterable[str], explain: bool, write: Path | None, force: bool,
               page: Path | None, as_json: bool) -> None:
    """Answer for a configuration of another framework. Raises HpcMpError if it does not fit, after the answer."""
    keys = {*(text.partition("=")[0].strip() for text in overrides), *(f"parallel.{key}" for key in base.stated)}
    foreign = read_foreign(source, {key: attrgetter(key)(base.spec) for key in keys.intersection(OURS.values())})
    settings = layout_settings(foreign, base.spec.ranks, base.spec.job.ranks_per_node, base.shape.layers)
    job = load_sweep(base.spec, [f"{key}={toml_value(item)}" for key, item in settings.items()])[0]
    assert isinstance(job, JobSpec)
    check_job(job, base.shape)
    question, layout = question_of(foreign, base, job), layout_of(job, base.shape)
    step, ranks = step_time(layout, base.shape, base.machine, question.framework), question.footprints(layout)
    own = Plan(job, layout, step, max(rank.total for rank in ranks), ranks)
    faster, fits = better(foreign, base, question, own), own.fits(base.machine)
    if page is not None:
        write_plan_page(question, replace(own, others=tuple(plan for plan, _ in faster)), page, time.time())
    if write is not None:
        write_new(write, dump_job(job), force)
    words = view("cli/plan_from.txt.j2", question=question, foreign=foreign, name=source.name, own=own, toml=toml_value)
    if as_json:
        plans = [asdict(replace(plan, tried=(), others=())) | {"changes": changes} for plan, changes in faster]
        document = asdict(own) | {"memory": base.machine.memory, "framework": foreign.framework, "fits": fits, "better": plans,
                                  "keys": [answer._asdict() for answer in foreign.answers]}
        click.echo(json.dumps(document, default=lambda job: job.model_dump(mode="json")))
    else:
        width = terminal().width if terminal().is_terminal else 10**6
        terminal().print(words.wrapped(words.text(explain, faster), width), markup=False, end="")
    if not fits:
        raise HpcMpError(*words.refusal(faster).strip().split("\n"))


def _hardware(question: Question, job: JobSpec) -> dict[str, Question]:
    """Return the question for a plan's nodes with twice as much of one thing."""
    nodes, machine = job.job.nodes, question.machine
    same_nodes = question.having(**{"job.nodes": nodes, "job.ranks_per_node": job.job.ranks_per_node})
    memory = replace(machine, gpu=replace(machine.gpu, memory_mib=2 * (machine.gpu.memory_mib or 0)))
    links = replace(machine, fabric=replace(machine.fabric, nic=2 * machine.fabric.nic))
    return {"nodes": same_nodes.having(**{"job.nodes": 2 * nodes}), "memory of a GPU": replace(same_nodes, machine=memory),
            "rate between nodes": replace(same_nodes, machine=links)}
