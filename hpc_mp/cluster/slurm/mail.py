"""A single mail from Slurm, sent by the job that ends a run.

``--mail-type=END,FAIL`` of a job script would send a mail for each job of a chain, and a FAIL mail for a node failure after which
Slurm requeues the job. So jobs request no mail. The job that reaches the run's verdict requests one while it still runs, which
``scontrol update`` permits its owner; Slurm sends it when the job's script has ended. Its subject has the state and the exit code
of the job: 0 if the run is complete. This module is separate to hold this reasoning.
"""

from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.cluster.slurm.requeue import is_own, job_record, persistent


def mail_at_end(job_id: str, script: Path, user: str, ask: Runner = persistent) -> str | None:
    """Request a mail to ``user`` at the end of this job. Return None on success, else the reason of the failure. ``script``: the
    run's own script; a step inside another session of the user is not a job of the run."""
    kinds = "END,FAIL,ARRAY_TASKS" if "_" in job_id else "END,FAIL"
    try:
        if not is_own(job_record(job_id, ask), job_id, script):
            return "this allocation does not belong to the job"
        ask(("scontrol", "update", f"JobId={job_id}", f"MailUser={user}", f"MailType={kinds}"))
    except CommandFailed as error:
        return str(error)
    return None
