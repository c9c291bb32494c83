"""The user's command at a run's end: started once, without a shell, with the outcome in its environment variables."""

from __future__ import annotations

import os
import subprocess
from collections.abc import Sequence

from hpc_mp.rundir import SECRET, TOKEN
from hpc_mp.rundir.outcome import Outcome

LIMIT_S = 60.0  # the job's nodes wait for it
WORDS = 500  # maximum number of characters of its output

# Environment variable of the command, and key of ``outcome.json``.
VARIABLES = {
    "HPC_MP_RUN": "run",
    "HPC_MP_STATE": "state",
    "HPC_MP_JOB_ID": "job_id",
    "HPC_MP_STEPS": "steps",
    "HPC_MP_LOSS": "loss",
    "HPC_MP_EVALUATION_LOSS": "evaluation_loss",
    "HPC_MP_BEST_EVALUATION_LOSS": "best_evaluation_loss",
    "HPC_MP_CHECKPOINT": "checkpoint",
    "HPC_MP_BEST_CHECKPOINT": "best_checkpoint",
    "HPC_MP_REPORT": "report",
}


def variables(outcome: Outcome) -> dict[str, str]:
    """Return the outcome as variables, empty if unknown. ``HPC_MP_NAME``: the job's name; ``HPC_MP_CAUSE``: the cause of a
    failure."""
    document = outcome.document()
    values = {name: document[key] for name, key in VARIABLES.items()}
    values |= {"HPC_MP_NAME": outcome.run.parent.name, "HPC_MP_CAUSE": outcome.cause.message if outcome.cause else None}
    return {name: "" if value is None else str(value) for name, value in values.items()}


def notify(outcome: Outcome, command: Sequence[str]) -> str | None:
    """Run the command to its end. Return the reason of its failure in one line; None if it succeeded."""
    inherited = {name: value for name, value in os.environ.items() if name not in (TOKEN, SECRET)}
    try:
        done = subprocess.run(command, cwd=outcome.run, env={**inherited, **variables(outcome)}, stdin=subprocess.DEVNULL,
                              stdout=subprocess.PIPE, stderr=subprocess.STDOUT, encoding="utf-8", errors="replace",
                              timeout=LIMIT_S, check=False)
    except OSError as error:
        return f"notify.command cannot be started ({error.strerror})"
    except (subprocess.TimeoutExpired, ValueError) as error:  # for example a value with a zero byte
        return f"notify.command was aborted ({error})"
    output = " ".join(done.stdout.split())[-WORDS:]
    return f"notify.command exited with {done.returncode}" + (f": {output}" if output else "") if done.returncode else None
