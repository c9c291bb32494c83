"""``python -m hpc_mp.supervisor.watch RUN``: the tiny job of ``supervisor.exclusions``."""

from __future__ import annotations

import os
import sys
from datetime import datetime
from pathlib import Path

from hpc_mp.base.command import CommandFailed
from hpc_mp.rundir import RunDirectory
from hpc_mp.supervisor.exclusions import poll


def main(run: str) -> int:
    """Run the watch and return the exit code: 1 if Slurm or the file system refused."""
    try:
        message, code = poll(RunDirectory(Path(run)), os.environ["SLURM_JOB_ID"]), 0
    except (CommandFailed, OSError) as error:
        message, code = str(error), 1
    print(f"{datetime.now():%H:%M:%S} {message}", flush=True)
    return code


if __name__ == "__main__":
    sys.exit(main(*sys.argv[1:]))
