"""``hpc-mp run``: the start of any distributed program."""

import re
from pathlib import Path, PurePath
from typing import Any

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.launch import launch_and_report, print_preview
from hpc_mp.cli.progress import TerminalListener
from hpc_mp.job import ProgramSpec
from hpc_mp.job.load import load_sweep
from hpc_mp.job.program import Program
from hpc_mp.job.spec import Job
from hpc_mp.job.values import job_name
from hpc_mp.launch.launch import ON, LaunchRequest, preview
from hpc_mp.launch.program.plan import size_of
from hpc_mp.launch.render import site_defaults


@click.command(help="Start any distributed program: COMMAND runs once for every rank, with torchrun's variables, on Slurm or on "
                    "emulated nodes of this machine. The defaults of --nodes and --ranks-per-node are those of the current "
                    "allocation, else 1 node with a rank per GPU. Arguments are passed unchanged, without a shell.",
               context_settings={"allow_interspersed_args": False})
@click.option("--nodes", type=click.IntRange(min=1), metavar="N",
              help="Number of nodes.  [default: those of the allocation, else 1]")
@click.option("--ranks-per-node", type=click.IntRange(min=1), metavar="M",
              help="Number of ranks per node.  [default: the allocation's, else one per GPU]")
@click.option("--on", type=click.Choice(ON), default="auto", show_default=True,
              help="Slurm, emulated nodes on this machine, or mpirun on its hosts (for ranks that meet through MPI); auto "
                   "prints its choice and the reason.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="A key of the job file: --set slurm.partition=gpu, --set job.time_limit=02:00:00.")
@click.option("--name", help="Name in squeue, and of the directory of its runs.  [default: the program's name]")
@click.option("--dry-run", is_flag=True, help="Check everything and print the job script; start and write nothing.")
@click.option("--explain", is_flag=True, help="Like --dry-run, with the reason for every line, and all defaults.")
@click.option("--wait", is_flag=True, help="Wait for the end of a Slurm job (all others are always waited for).")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document at the end; all other output goes to stderr.")
@click.argument("words", nargs=-1, type=click.UNPROCESSED, metavar="-- COMMAND [ARG]…")
def command(nodes: int | None, ranks_per_node: int | None, on: str, overrides: tuple[str, ...], name: str | None, dry_run: bool,
            explain: bool, wait: bool, as_json: bool, words: tuple[str, ...]) -> int:
    if not words:
        raise HpcMpError("hpc-mp run", "needs a program", "write it after two dashes: hpc-mp run -- python train.py --lr 1e-3")
    for number, word in enumerate(words):
        if not word.isprintable() and "\udc80" <= max(word) <= "\udcff":
            raise HpcMpError(f"word {number + 1} of the command", "must be UTF-8 text, like the job file", "write it in UTF-8")
    for option, value in (("job.nodes", nodes), ("job.ranks_per_node", ranks_per_node)):
        if value is not None and any(text.partition("=")[0].strip() == option for text in overrides):
            raise HpcMpError(f"--set {option}", f"is also set by --{option[4:].replace('_', '-')}", "set it once")
    listener = TerminalListener(aside=as_json or dry_run or explain)
    job, why = _job(words, nodes, ranks_per_node, on, overrides, name)
    if why:
        listener.say(f"size      {why}")
    request = LaunchRequest(job, on, overrides, wait)
    if dry_run or explain:
        print_preview(preview(request, listener), explain, as_json)
        return 0
    return launch_and_report(request, listener, as_json)


def _job(words: tuple[str, ...], nodes: int | None, ranks_per_node: int | None, on: str, overrides: tuple[str, ...],
         name: str | None) -> tuple[ProgramSpec, str]:
    """Return the job of the command line, and the source of the sizes that it omits."""
    fields: dict[str, Any] = {"name": name or name_of(words)}
    job = ProgramSpec(job=Job(**fields), program=Program(command=words, directory=str(Path.cwd())))
    sized = [text for text in overrides if not re.match(r"\s*(parallel\.|program\.axes\b)", text)]  # the others need the sizes
    first = load_sweep(job, sized, site_defaults(Path.cwd()))[0]
    assert isinstance(first, ProgramSpec)
    fixed = {text.partition("=")[0].strip() for text in overrides}
    size = size_of(first, nodes if "job.nodes" not in fixed else first.job.nodes,
                   ranks_per_node if "job.ranks_per_node" not in fixed else first.job.ranks_per_node, on)
    fields |= {"nodes": size.nodes, "ranks_per_node": size.ranks_per_node}
    return ProgramSpec(job=Job(**fields), program=job.program), size.why


def name_of(words: tuple[str, ...]) -> str:
    """Return a job's name: the script's, else the program's."""
    script = next((word for word in words if re.fullmatch(r".*\.(py|pyz|sh)", word)), words[0])
    return job_name(PurePath(script).stem, "program")
