"""``hpc-mp train``: what each rank runs."""

from __future__ import annotations

import gc
import os
import sys
from pathlib import Path

import click


@click.command(help="What each rank runs (under srun, mpirun, torchrun or the emulator).")
@click.argument("job", type=click.Path(path_type=Path))
def command(job: Path) -> None:
    from hpc_mp.train.rank.signals import StopFlag

    stop = StopFlag()  # to be asked to stop from now on: torch takes seconds to import
    gc.disable()  # what imports make stays: to look for garbage in it takes a fifth of their time
    from hpc_mp.train.rank.main import main

    gc.freeze()
    gc.enable()
    code = main(job, stop)
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(code)  # gloo with sub-groups aborts when the interpreter is torn down
