"""Have Slurm send one mail, by the job that ends a run.

``--mail-type=END,FAIL`` of a job script would not do: the mails of a chain are as many as its jobs, and a node failure after
which Slurm requeues the job is a FAIL mail too. So jobs ask for no mail, and the one that has come to the run's verdict asks for
one while it still runs, which ``scontrol update`` lets its owner do; Slurm sends it when the job's script has ended. Its subject
has the state and the exit code of the job: 0 where the run is complete. The file is alone for this reasoning.
"""

from __future__ import annotations

from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.cluster.slurm.requeue import is_own, job_record, persistent


def mail_at_end(job_id: str, script: Path, user: str, ask: Runner = persistent) -> str | None:
    """Ask for a mail to ``user`` at the end of this very job; None when that was done, else why it was not.

    Args:
        script: the run's own: a step inside somebody's session is no job of the run.
    """
    kinds = "END,FAIL,ARRAY_TASKS" if "_" in job_id else "END,FAIL"
    try:
        if not is_own(job_record(job_id, ask), job_id, script):
            return "this allocation is not the job's own"
        ask(("scontrol", "update", f"JobId={job_id}", f"MailUser={user}", f"MailType={kinds}"))
    except CommandFailed as error:
        return str(error)
    return None
