"""Gate that decides if this node is fit for a job. ``slurm/node-start.sh`` runs it on every node before the ranks start.

``python -m hpc_mp.doctor.gate`` prints a line for every error and exits with 1 if there is one. If the machine itself has no
error, NCCL is started to see which network it uses. HPC_MP_DOCTOR_ROOT and HPC_MP_DOCTOR_COMMANDS name a recorded machine to
check instead, as ``hpc-mp doctor --root DIR --commands FILE`` does.
"""

import os
import sys
from collections.abc import Mapping
from pathlib import Path

from hpc_mp.doctor.checks.registry import FIT
from hpc_mp.doctor.nccl_log.judge import refused, taken
from hpc_mp.doctor.node import diagnose, injected

DEADLINE_S = 20.0  # for a node on which something hangs; others finish in about a second, a busy node in a few


def main(environ: Mapping[str, str] = os.environ) -> int:
    root, commands = (environ.get(f"HPC_MP_DOCTOR_{name}") for name in ("ROOT", "COMMANDS"))
    source = injected(Path(root) if root else None, Path(commands) if commands else None)
    errors = refused(diagnose(source, FIT, DEADLINE_S)) or refused(taken(source))
    for finding in errors:
        print(f"{finding.code}: {finding.subject + ': ' if finding.subject else ''}{finding.message}")
    return 1 if errors else 0


if __name__ == "__main__":
    sys.exit(main())
