"""Recorded output of Slurm 24.11 about jobs in many states. Run as a program, this module records it again."""

import re
import sys
import time
from pathlib import Path

sys.path.insert(0, str(Path(__file__).parents[1]))

from slurm_lab.chroot import built
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.cluster.slurm.jobs import LINE

RECORDED = Path(__file__).parents[1] / "golden" / "queue"
LINES, SHOWN = "squeue-24.11.lines", "scontrol-24.11.lines"
# The selection from the 50 words of scontrol for a job.
WORDS = ("JobId", "ArrayJobId", "ArrayTaskId", "HetJobId", "HetJobOffset", "JobName", "JobState", "Reason", "Restarts",
         "ExitCode", "StartTime", "ReqNodeList", "ExcNodeList", "NodeList", "BatchHost")
# job: its options. Each ends or remains in a different state.
JOBS: dict[str, tuple[str, ...]] = table(__file__, "recorded.toml", "jobs")


def play(lab: Cluster) -> dict[str, int]:
    """Bring a job into each state and return the job IDs. The last one's state lasts for KillWait, 5 s."""
    ids = {name: lab.sbatch(f"--job-name={name}", *options) for name, options in JOBS.items()}
    for name in ("failed", "killed"):
        lab.wait_job(ids[name])
    for name in ("running", "requeued", "array", "components", "clearing up"):
        lab.wait_job(ids[name], "RUNNING")
    lab.run(["scontrol", "requeue", str(ids["requeued"])], check=True)
    time.sleep(1)  # the trap must be set
    lab.run(["scancel", str(ids["clearing up"])], check=True)
    lab.wait_job(ids["clearing up"], "COMPLETING")
    return ids


def answers(lab: Cluster) -> dict[str, str]:
    """Return the output of each program at one moment, by the name of its file."""
    shown = lab.run(["scontrol", "show", "job", "--oneliner"], check=True).stdout
    return {
        LINES: lab.run(["squeue", "--states=all", "--noheader", f"--Format={LINE}"], check=True).stdout,
        SHOWN: re.sub(rf" (?!({'|'.join(WORDS)})=)[\w/:]+=\S*", "", shown),
    }


if __name__ == "__main__":
    with Lab(chroot=built(), patience=120) as running:
        play(running)
        RECORDED.mkdir(exist_ok=True)
        for file, text in answers(running).items():
            (RECORDED / file).write_text(text)
