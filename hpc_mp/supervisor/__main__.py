"""``python -m hpc_mp.supervisor RUN -- srun … COMMAND``: one attempt of a run."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_mp.supervisor.signals import Signals


def main(arguments: Sequence[str]) -> int:
    """The exit code of the job: 0 where the run is complete or the job is queued again, 75 stopped, 2 the input is wrong, else
    what srun ended with."""
    signals = Signals()  # first of all: Slurm may warn at any moment
    from hpc_mp.base.errors import HpcMpError
    from hpc_mp.supervisor.attempt import start

    run, dashes, *command = arguments
    if dashes != "--" or not command:
        raise SystemExit("usage: python -m hpc_mp.supervisor RUN -- srun … COMMAND")
    try:
        return start(Path(run), command, signals)
    except (HpcMpError, OSError) as error:
        print(f"hpc-mp: {error}", file=sys.stderr)
        return 2 if isinstance(error, HpcMpError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
