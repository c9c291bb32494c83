"""``python -m hpc_mp.supervisor [--after CODE] RUN -- srun … COMMAND``: one attempt of a run, or the rest of one."""

import sys
from collections.abc import Sequence
from pathlib import Path

from hpc_mp.supervisor.signals import Signals


def main(arguments: Sequence[str]) -> int:
    """Run the supervisor and return the exit code of the job: 0 if the run is complete or the job is requeued, 75 if stopped, 2
    for an invalid input, else srun's code."""
    signals = Signals()  # first, since Slurm may warn at any moment
    from hpc_mp.base.errors import HpcMpError
    from hpc_mp.supervisor.after import go_on_after
    from hpc_mp.supervisor.attempt import start

    after = int(arguments[1]) if arguments[0] == "--after" else None
    run, dashes, *command = arguments if after is None else arguments[2:]
    if dashes != "--" or not command:
        raise SystemExit("usage: python -m hpc_mp.supervisor [--after CODE] RUN -- srun … COMMAND")
    try:
        return start(Path(run), command, signals) if after is None else go_on_after(after, Path(run), command, signals)
    except (HpcMpError, OSError) as error:
        print(f"hpc-mp: {error}", file=sys.stderr)
        return 2 if isinstance(error, HpcMpError) else 1


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
