"""A rank's claim to its run directory: it may write there as long as the start that it belongs to is the current one.

A job that Slurm starts again has the same run directory. Ranks of its earlier start may live on, on a node that was cut
off and came back: they must neither join the new ranks nor publish anything.
"""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, read_attempt


class Stale(Exception):
    """The run has been started again: this rank belongs to an earlier start."""


class Claim:
    """Of ranks that no launcher counts the starts of: it always holds."""

    token = ""

    def check(self) -> None:
        """Raises Stale. Made for every step: it costs one look at the file's date."""

    def confirm(self) -> None:
        """Raises Stale. Made before something is published: the file is read, so that NFS asks its server."""

    def holds(self) -> bool:
        """The same as a question."""
        try:
            self.confirm()
        except Stale:
            return False
        return True


class TokenClaim(Claim):
    """Holds while ``attempt.json`` has this rank's token. A file system that does not answer says nothing of it."""

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
            raise Stale(f"this rank belongs to start {self.token} of the run, its current start is {current}")


def claim(run: RunDirectory | None, environ: Mapping[str, str] = os.environ) -> tuple[Claim, AttemptRecord | None]:
    """What this rank may claim, and what its launcher wrote down for it; None without such a launcher.

    Args:
        run: the run directory in which the job file lies; None when a launcher has made none.

    Raises:
        Stale: another start is the current one.
        HpcMpError: the launcher's record cannot be read here.
    """
    token = environ.get(TOKEN)
    if run is None or token is None:
        return Claim(), None
    try:
        record = read_attempt(run.attempt_record)
    except (OSError, ValueError) as error:
        raise HpcMpError(f"{TOKEN} = {token}", f"belongs to {run.attempt_record}, which cannot be read here ({error})",
                         "keep job.directory on a file system that all nodes see, and start ranks with hpc-mp launch") from None
    mine = TokenClaim(run.attempt_record, token)
    mine.confirm()
    return mine, record
