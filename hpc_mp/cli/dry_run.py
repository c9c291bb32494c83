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
from hpc_mp.base.text import counted, data_size, duration, memory_size, several
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


def _fit(fit: "Fit") -> str:
    """Return a sentence about the longest sample that fits."""
    device = f"in {memory_size(fit.memory)}"
    if not fit.tokens:
        return f"no sample {device}: one of {fit.more or 0:,} tokens needs about {memory_size(fit.more_bytes)}"
    words = f"samples of {fit.tokens:,} tokens {device}: about {memory_size(fit.bytes)} with what libraries take"
    if fit.limit:
        return f"{words}. No longer one is allowed: {fit.limit}"
    return f"{words}; {fit.more or 0:,} tokens need {memory_size(fit.more_bytes)}"


def _print(result: "DryRun", fit: "Fit | None") -> None:
    console = terminal()
    place, stages = result.place, ", ".join(map(str, result.stages))
    library = "NCCL" if result.device == "cuda" else "gloo"
    console.print(f"rank {place.rank} of {result.world:,} on {result.device} over {library}: "
                  f"dp {place.dp}, pp {place.pp}, tp {place.tp}, local rank {place.local_rank} of node {place.node}; "
                  f"stage {stages} with {' + '.join(str(result.layers[stage]) for stage in result.stages)} of "
                  f"{counted(sum(result.layers), 'layer')}")
    for table in (_units(result), _messages(result)):
        console.print()
        console.print(table)
    sockets, loading, saving = result.sockets, result.loading, result.saving
    rows = _memory(result) | {
        "groups": ", ".join(f"{axis} ({ranks})" for axis, ranks in result.groups),
        "sockets": f"gloo {sockets.gloo:,}, store {sockets.store:,}, heartbeat {sockets.heartbeat:,}: "
                   f"{counted(sockets.descriptors, 'file descriptor')}" + (
                       f", and {counted(sockets.nccl, 'communicator')} of NCCL" if sockets.nccl else ""),
    }
    if sockets.nccl:
        rows["NCCL"] = f"about {memory_size(sockets.buffers)} of the device for buffers, which the peak does not contain"
    rows |= {
        "start": f"{_weights(loading.weights)}; at most {memory_size(loading.first_values)} on the host at once",
        "resume": f"reads {several(loading.checkpoint)}; at most {memory_size(loading.restored)} on the host at once",
        "save": f"writes {', '.join(saving.files) or 'nothing'}, {data_size(saving.bytes)}; "
                f"at most {memory_size(saving.host)} copied to the host at once",
    }
    if fit is not None:
        rows["fits"] = _fit(fit)
    console.print()
    for name, text in rows.items():
        console.print(f"{name:<11}{text}", markup=False)
    console.print(f"\ncomputed in {duration(result.seconds)}, without a GPU and without other ranks")


def _weights(files: tuple[str, ...] | None) -> str:
    if files is None:
        return "reads weights that do not exist yet"
    return f"reads {', '.join(files)}" if files else "draws random values"


def _units(result: "DryRun") -> Table:
    table = number_table("units", "number", "parameters", "updated by it")
    kinds: dict[tuple[str, int, int], int] = {}
    for unit in result.step.units:
        key = unit.unit.rstrip("0123456789").rstrip("."), unit.padded, unit.part
        kinds[key] = kinds.get(key, 0) + 1
    for (name, padded, part), number in kinds.items():
        table.add_row(name, f"{number}", f"{padded:,}", f"{part:,}")
    return table


def _memory(result: "DryRun") -> dict[str, str]:
    step, state, peak = result.step, result.step.state, result.step.peak
    others = peak.bytes - step.rest - peak.gathered - peak.slabs
    parts = {"state": step.rest, "gathered parameters": peak.gathered, "gradients in transit": peak.slabs, "activations": others}
    elsewhere = {"in the host's memory": state.host, "on a disk": state.disk}
    return {
        "state": f"{memory_size(step.rest)} between steps: parameters {memory_size(state.parameters)}, gradients "
                 f"{memory_size(state.gradients)}, optimizer {memory_size(state.optimizer)}"
                 + "".join(f"; {memory_size(size)} {where}" for where, size in elsewhere.items() if size),
        "peak": f"{memory_size(peak.bytes)} in {peak.where}: "
                f"{', '.join(f'{name} {memory_size(size)}' for name, size in parts.items() if size)}",
        "by action": ", ".join(f"{kind} {memory_size(largest.bytes)}" for kind, largest in step.peaks.items()),
        "in flight": f"activations of {counted(step.in_flight, 'chunk')} at most",
    }


def _messages(result: "DryRun") -> Table:
    table = number_table("messages", "ranks", "kind", "each", "number", "sent per step", words=["kind"])
    for message in result.step.messages:
        table.add_row(message.axis, f"{message.ranks:,}", message.kind, data_size(message.bytes), f"{message.count:,}",
                      data_size(message.sent))
    return table
