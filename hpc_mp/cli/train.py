"""``hpc-mp train``: the command that each rank runs."""

import os
import sys
from pathlib import Path

import click

from hpc_mp.base.errors import HpcMpError


@click.command(help="The command of each rank (under srun, mpirun, torchrun or the emulator). With --dry-run: the memory, "
                    "messages, connections and files of one rank of a job of any size, without its hardware. With --profile: the "
                    "cost of embedding, block and head on this device, for parallel.partition = \"profile\".")
@click.argument("job", type=click.Path(path_type=Path))
@click.option("--dry-run", is_flag=True, help="Build one rank, run one step on tensors without values, and print its needs.")
@click.option("--profile", is_flag=True, help="Measure time and memory of the model's units on this device, and write them.")
@click.option("--rank", type=int, metavar="N", help="Rank of the dry run; only with --dry-run.  [default: 0]")
@click.option("--memory", type=click.FloatRange(min=0, min_open=True), metavar="GIB",
              help="Also search for the longest sample that fits into a device of so many GiB; only with --dry-run.")
@click.option("--set", "overrides", multiple=True, metavar="KEY=VALUE",
              help="Override a key: --set job.nodes=2048; only with --dry-run or --profile.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document; only with --dry-run or --profile.")
def command(job: Path, dry_run: bool, profile: bool, rank: int | None, memory: float | None, overrides: tuple[str, ...],
            as_json: bool) -> None:
    if dry_run and profile:
        raise HpcMpError("--profile", "measures on a device, but --dry-run uses none", "leave one of them out")
    if profile:
        from hpc_mp.cli.dry_run import profile_and_print

        for option, value in (("--rank", rank), ("--memory", memory)):
            if value is not None:
                raise HpcMpError(option, "has an effect only with --dry-run: --profile is the same for all ranks", "leave it out")
        profile_and_print(job, overrides, as_json)
        return
    if dry_run:
        from hpc_mp.cli.dry_run import dry_run_and_print

        dry_run_and_print(job, overrides, rank or 0, memory, as_json)
        return
    for option, is_set in (("--rank", rank is not None), ("--memory", memory is not None), ("--set", bool(overrides)),
                           ("--json", as_json)):
        if is_set:
            raise HpcMpError(option, "has no effect for a rank, which reads its launcher and its job file",
                             "add --dry-run or --profile, or leave it out")
    from hpc_mp.base.garbage import uncollected
    from hpc_mp.program.stepd import watch_stepd
    from hpc_mp.rundir import RunDirectory
    from hpc_mp.train.rank.signals import StopFlag

    watch_stepd(RunDirectory(job.resolve().parent))
    stop = StopFlag()  # catches stop signals from here on, because torch takes seconds to import
    with uncollected():
        from hpc_mp.train.rank.main import main

    code = main(job, stop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo with sub-groups aborts when the interpreter is torn down
