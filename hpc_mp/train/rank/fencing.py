"""Fencing: a rank may write into its run directory only while its attempt is the current one.

A job that Slurm requeues has the same run directory. Ranks of its earlier attempt may still be alive on a node that was cut off
and came back: they must neither join the new ranks nor publish anything.
"""

import os
from collections.abc import Mapping
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, read_attempt


class RunRemoved(Exception):
    """The run directory is gone: results could not be kept."""


class FencedOut(Exception):
    """The run has been started again: this rank belongs to an earlier attempt."""


def check_kept(run: RunDirectory) -> None:
    """Raise RunRemoved if the run directory is gone. Called every step: it costs one stat of the job file."""
    if run.removed:
        raise RunRemoved(f"the run directory {run.path} was removed while the run went on")


class Fence:
    """A fence for ranks whose attempts no launcher counts: it always holds."""

    token = ""

    def check(self) -> None:
        """Raise FencedOut if the fence does not hold. Called every step: it costs one stat of the file."""

    def confirm(self) -> None:
        """Raise FencedOut if the fence does not hold. Called before publishing: the file is read, so that NFS asks its server."""

    def holds(self) -> bool:
        """Return True if the fence holds."""
        try:
            self.confirm()
        except FencedOut:
            return False
        return True


class TokenFence(Fence):
    """A fence that holds while ``attempt.json`` has this rank's token. A file system that does not answer does not break it."""

    def __init__(self, path: Path, token: str) -> None:
        self.path = path
        self.token = token
        self._seen: tuple[int, int] | None = None

    def check(self) -> None:
        try:
            status = self.path.stat()
        except OSError:
            return
        mark = status.st_ino, status.st_mtime_ns
        if mark != self._seen:
            self.confirm()
            self._seen = mark

    def confirm(self) -> None:
        try:
            current = read_attempt(self.path).token
        except (OSError, ValueError):
            return
        if current != self.token:
            raise FencedOut(f"this rank belongs to attempt {self.token} of the run, whose current attempt is {current}")


def fence(run: RunDirectory | None, environ: Mapping[str, str] = os.environ) -> tuple[Fence, AttemptRecord | None]:
    """Return this rank's fence and the attempt record of its launcher; None without such a launcher. ``run``: the run directory
    that contains the job file; None if no launcher has made one. Raises FencedOut if another attempt is the current one, and
    HpcMpError if the launcher's record cannot be read here."""
    token = environ.get(TOKEN)
    if run is None or token is None:
        return Fence(), None
    try:
        record = read_attempt(run.attempt_record)
    except (OSError, ValueError) as error:
        raise HpcMpError(f"{TOKEN} = {token}", f"belongs to {run.attempt_record}, which cannot be read here ({error})",
                         "keep job.directory on a file system that all nodes see, and start ranks with hpc-mp launch") from None
    mine = TokenFence(run.attempt_record, token)
    mine.confirm()
    return mine, record
