"""``environment.profile``, applied on the job's first node: the variables that the ranks get, and the file that says why."""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.files import write_text
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.job import of_interpreter, profile_job
from hpc_mp.environment.versions import Installed, distribution
from hpc_mp.job import JobSpec
from hpc_mp.rundir import RunDirectory

PYXIS_NAMES = "--container-env="  # srun's option: else the values of the image win over these


def apply_profile(run: RunDirectory, spec: JobSpec, command: Sequence[str], environ: Mapping[str, str],
                  source: NodeSource | None = None) -> tuple[list[str], dict[str, str], str | None]:
    """The ranks' command and environment, and a sentence for the main log; both unchanged for a job without a profile.

    Args:
        command: srun and what it starts; pyxis gets the names in it.
        environ: of the job script: what a module, ``slurm.setup`` or ``environment.set`` says there goes before the profile.

    Raises:
        HpcMpError: there is no such profile.
    """
    if spec.environment.profile is None:
        return list(command), dict(environ), None
    container = spec.slurm.container is not None
    found = profile_job(spec.environment.profile, source or NodeSource(), environ, spec.environment.set, container=container,
                        installed=_rank_packages(command))
    host = environ.get("SLURMD_NODENAME") or os.uname().nodename
    seen = "outside of the container, whose own libraries and files are not seen" if container else "for all nodes of the job"
    head = f"profile {found.profile.name} ({found.profile.title}), applied on {host}, {seen}"
    with suppress(OSError):  # a log that cannot be written keeps no job from running
        write_text(run.profile_log, "".join(f"{line}\n" for line in (head, *found.lines())))
    extended = [f"{word},{','.join(found.exported)}" if word.startswith(PYXIS_NAMES) and found.exported else word
                for word in command]
    return extended, found.environ, f"{found.summary()}, as {host} shows itself; {run.profile_log.relative_to(run.path)} says why"


def _rank_packages(command: Sequence[str]) -> Installed:
    """The packages that ranks see: those of the interpreter that runs ``-m hpc_mp`` in their command."""
    at = [number for number, word in enumerate(command) if word == "hpc_mp" and command[number - 1] == "-m"]
    python = command[at[-1] - 3] if at and at[-1] >= 3 else sys.executable
    same = python == sys.executable or not Path(python).is_file()  # a staged environment, not there yet, is a copy of this one
    return distribution if same else of_interpreter(python)
