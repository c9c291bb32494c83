"""``hpc-mp init``: detect the available hardware and write a job file that runs on it."""

import shlex
from dataclasses import replace
from pathlib import Path

import click

from hpc_mp.base.text import counted, memory_size
from hpc_mp.cli.output import write_new
from hpc_mp.cli.plan import command as plan
from hpc_mp.cluster.slurm.limits import Qos
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.cluster.slurm.site import SlurmSite, ThisMachine, find_machine, find_site
from hpc_mp.job.values import toml_value
from hpc_mp.launch.first_job import job_text
from hpc_mp.planner.device import torch_has_cuda
from hpc_mp.planner.expectation import machine_of


@click.command(help="Detect Slurm partitions, account and GPUs, and write a job file that runs here. With --model: for the best "
                    "plan of its training, as `hpc-mp plan` shows it.")
@click.argument("path", default="job.toml", type=click.Path(dir_okay=False, path_type=Path))
@click.option("--model", metavar="MODEL", help="A checkpoint's directory, a config.json or a type.")
@click.option("--nodes", type=int, help="With --model. Default: the fewest that fit.")
@click.option("--machine", metavar="NAME", help="With --model: a machine or a GPU of the catalogue. Default: what is here.")
@click.option("--force", is_flag=True, help="Replace PATH if it exists.")
def command(path: Path, model: str | None, nodes: int | None, machine: str | None, force: bool) -> None:
    local, site, cuda = find_machine(), find_site(), torch_has_cuda()
    local, cluster = local if cuda else replace(local, gpus=()), site if isinstance(site, SlurmSite) else None
    for line in (_machine(local, cuda), *_site(site)):
        click.echo(line)
    if model is None:
        write_new(path, job_text(local, cluster), force)
    else:
        name, keys = (machine, ()) if machine else _nodes(local, cluster)
        click.get_current_context().invoke(plan, model=model, nodes=nodes, machine=name, write=path, force=force,
                                           overrides=(*keys, *_settings(cluster)))
    change = "" if model is None else "set data.files and train.steps, "
    click.echo(f"\nwrote {path}; {change}start it with\n\n    hpc-mp launch {shlex.quote(str(path))}\n")


def _nodes(local: ThisMachine, site: SlurmSite | None) -> tuple[str, tuple[str, ...]]:
    """Return the catalogue's name of the cluster's nodes, else of this machine, and the setting of their GPUs' number. Raises
    HpcMpError if it has none."""
    gpu, count = (local.gpus[0].name, len(local.gpus)) if local.gpus else (None, 0)
    gpu, count = (site.kind.gpu_type, site.kind.gpu_count) if site else (gpu, count)
    return machine_of(gpu, count).fabric.name, (f"job.ranks_per_node={count}",)


def _settings(site: SlurmSite | None) -> tuple[str, ...]:
    """Return the settings of a job in the site's partition."""
    keys = {"partition": site.chosen.name, "account": site.terms.account, "qos": site.terms.qos,
            "gpu_type": site.kind.gpu_type} if site else {}
    return tuple(f"slurm.{key}={toml_value(value)}" for key, value in keys.items() if value)


def _machine(machine: ThisMachine, cuda: bool) -> str:
    gpus = ", ".join(gpu.name for gpu in machine.gpus) or "no GPU"
    if machine.gpus and not cuda:
        gpus += " (unused: the installed torch is built without CUDA)"
    return f"this machine  {machine.cores} cores, {memory_size(machine.memory)}, {gpus}"


def _site(site: SlurmSite | str) -> list[str]:
    if isinstance(site, str):
        return [f"Slurm         none: {site}"]
    release = ".".join(f"{part:02d}" for part in site.version) if site.version else "of unknown version"
    account = site.terms.account
    others = [name for name in site.accounts if name != account]
    lines = [f"Slurm         {release}, {f'account {account}' if account else 'no accounting'}"
             + (f" (others: {', '.join(others)})" if others else "")]
    if site.terms.quality is not None:
        lines.append(f"  QOS         {_quality(site.terms.quality, explicit=site.terms.qos is not None)}")
    return lines + [_partition(partition, partition is site.chosen) for partition in site.partitions]


def _partition(partition: SlurmPartition, chosen: bool) -> str:
    marks = "".join([" (default)" * partition.default, "" if partition.up else " (down)", " ← used" * chosen])
    limit = f", at most {partition.time_limit}" if partition.time_limit else ""
    return f"  partition   {partition.name}{marks}: {'; '.join(map(_kind, partition.kinds)) or 'no nodes'}{limit}"


def _quality(quality: Qos, explicit: bool) -> str:
    limits = [*([f"{quality.max_wall} per job"] if quality.max_wall else []),
              *([f"{quality.jobs} jobs at once"] if quality.jobs is not None else []),
              *([f"{', '.join(f'{count} {name}' for name, count in quality.per_user.items())} at once"]
                if quality.per_user else [])]
    return (f"{quality.name} ({'the partition refuses your default' if explicit else 'your default'})"
            + (f": at most {'; '.join(limits)}" if limits else ""))


def _kind(kind: NodeKind) -> str:
    gpus = f", {kind.gpu_count} × {kind.gpu_type or 'GPU'}" if kind.gpus else ""
    return f"{counted(len(kind.nodes), 'node')} with {counted(kind.cpus, 'CPU')}{gpus}"
