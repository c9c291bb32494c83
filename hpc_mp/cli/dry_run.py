"""``hpc-mp train --dry-run``: a rank's memory, messages, connections and files, as tables or as one JSON document; and
``--profile``: the cost of the units of a job's model on this device, for ``parallel.partition``."""

import json
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

import click
from rich.table import Table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_train
from hpc_mp.base.text import counted, data_size, memory_size
from hpc_mp.base.views import view
from hpc_mp.cli.output import number_table, terminal
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.launch.plan import stages_of
from hpc_mp.layout.model_profile import ModelProfile, write_profile
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.optimizers import WHOLE_WEIGHTS
from hpc_mp.layout.placement import place
from hpc_mp.planner.order import choose_rank_order
from hpc_mp.planner.traffic import traffic_of

if TYPE_CHECKING:
    from hpc_mp.train.dry_run.dry_run import DryRun, Fit

REPETITIONS = 10


def profile_and_print(job: Path, overrides: Sequence[str], as_json: bool) -> None:
    """Profile a job's model and print it. Raises HpcMpError for an invalid job, a missing device or unwritable file."""
    need_train("hpc-mp train --profile")
    spec = load_job(job, overrides)
    shape = read_shape(spec)
    check_job(spec, shape)
    from hpc_mp.train.rank.unit_profile import measure  # imports torch

    profile = measure(spec, shape, REPETITIONS)
    try:
        write_profile(spec.profile, profile)
    except OSError as error:
        raise HpcMpError(f"the profile {spec.profile}", f"cannot be written ({error.strerror})",
                         "set another file in parallel.profile, or another job.directory") from None
    if as_json:
        click.echo(json.dumps({**asdict(profile), "file": str(spec.profile)}))
    else:
        _print_profile(profile, spec, shape)


def _print_profile(profile: ModelProfile, spec: JobSpec, shape: ModelShape) -> None:
    console = terminal()
    console.print(f"{shape.model_type} on {profile.device}: one microbatch of {counted(spec.microbatch_size, 'sequence')} of "
                  f"{spec.data.sequence_length:,} tokens in {spec.train.precision}, recompute {spec.parallel.recompute}; "
                  f"median of {profile.repetitions}", markup=False)
    table = number_table("unit", "number", "forward + backward", "activations", "parameters")
    blocks = [("block" if len(profile.blocks) == 1 else f"block {shape.kinds.index(kind)}", shape.kinds.count(kind), unit)
              for kind, unit in enumerate(profile.blocks)]
    for name, number, unit in (("embedding", 1, profile.embedding), *blocks, ("norm and head", 1, profile.head)):
        table.add_row(name, f"{number}", f"{unit.seconds * 1e3:.3f} ms", memory_size(unit.activations),
                      memory_size(unit.parameters))
    console.print()
    console.print(table)
    measured = spec.model_copy(update={"parallel": spec.parallel.model_copy(update={"partition": "profile"})})
    cut = stages_of(measured, shape)
    console.print(f"\nwritten to {spec.profile}\npartition = \"profile\" results in {list(cut.layers)}: {cut.why}", markup=False)


def dry_run_and_print(job: Path, overrides: Sequence[str], rank: int, memory: float | None, as_json: bool) -> None:
    """Compute and print a dry run. ``memory``: GiB of a device, for the longest sample that fits; None: it is not searched for.
    Raises HpcMpError for an invalid job or rank."""
    need_train("hpc-mp train --dry-run")
    order, result = _at(job, overrides, rank)
    fit = None
    if memory is not None:
        from hpc_mp.train.dry_run.dry_run import longest  # imports torch

        spec = load_job(job, overrides)
        unit = 2 * spec.parallel.context * spec.parallel.tensor
        fit = longest(lambda tokens: _at(job, [*overrides, f"data.sequence_length={tokens}"], rank)[1],
                      spec.data.sequence_length, unit, int(memory * 2**30))
    if as_json:
        document = {**asdict(result), "order": order, "peak": asdict(result.step.peak)}
        click.echo(json.dumps(document if fit is None else {**document, "fit": asdict(fit)}))
    else:
        _print(result, fit)


def _at(job: Path, overrides: Sequence[str], rank: int) -> tuple[str, "DryRun"]:
    """Return the rank order of a job, and the dry run of a rank."""
    spec = load_job(job, overrides)
    shape = read_shape(spec)
    check_job(spec, shape)
    if not 0 <= rank < spec.ranks:
        raise HpcMpError(f"--rank {rank}", f"must be 0 to {spec.ranks - 1} in this job", "pass one of these ranks")
    if spec.train.optimizer in WHOLE_WEIGHTS:
        raise HpcMpError(f"train.optimizer = {spec.train.optimizer!r}", "updates weights by their numbers, which a dry run does "
                         "not have", "use --set train.optimizer=adamw for all but the optimizer")
    layout = layout_of(spec, shape)
    order = choose_rank_order(layout, traffic_of(layout, shape))
    placement = place(layout.degrees, order.letters, layout.ranks_per_node, layout.rank_map)
    from hpc_mp.train.dry_run.dry_run import dry_run  # imports torch

    return order.letters, dry_run(spec, shape, placement, rank)


def _print(result: "DryRun", fit: "Fit | None") -> None:
    console, words = terminal(), view("cli/dry_run.txt.j2")
    console.print(words.place(result), markup=False)
    for part in (_units(result), _messages(result), words.rows(result, fit)):
        console.print()
        console.print(part, markup=False)


def _units(result: "DryRun") -> Table:
    table = number_table("units", "number", "parameters", "updated by it")
    kinds: dict[tuple[str, int, int], int] = {}
    for unit in result.step.units:
        key = unit.unit.rstrip("0123456789").rstrip("."), unit.padded, unit.part
        kinds[key] = kinds.get(key, 0) + 1
    for (name, padded, part), number in kinds.items():
        table.add_row(name, f"{number}", f"{padded:,}", f"{part:,}")
    return table


def _messages(result: "DryRun") -> Table:
    table = number_table("messages", "ranks", "kind", "each", "number", "sent per step", words=["kind"])
    for message in result.step.messages:
        table.add_row(message.axis, f"{message.ranks:,}", message.kind, data_size(message.bytes), f"{message.count:,}",
                      data_size(message.sent))
    return table
