"""Recorded output of Slurm 24.11 about jobs in many states. Run as a program, this module records it again."""

from __future__ import annotations

import json
import re
import time
from pathlib import Path
from typing import Any

from slurm_lab.chroot import built
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab

from hpc_mp.cluster.slurm.job import LINE

RECORDED = Path(__file__).parents[1] / "golden" / "queue"
JSON, LINES, SHOWN = "squeue-24.11.json", "squeue-24.11.lines", "scontrol-24.11.lines"
# Of the 150 fields of a job in squeue --json, those that are read, and two that identify it.
FIELDS = ("job_id", "name", "user_name", "array_job_id", "array_task_id", "array_task_string", "het_job_id", "het_job_offset",
          "job_state", "state_reason", "state_description", "start_time", "nodes", "restart_cnt", "exit_code")
# The selection from the 50 words of scontrol for a job.
WORDS = ("JobId", "ArrayJobId", "ArrayTaskId", "HetJobId", "HetJobOffset", "JobName", "JobState", "Reason", "Restarts",
         "ExitCode", "StartTime", "ReqNodeList", "ExcNodeList", "NodeList", "BatchHost")
# job: its options. Each ends or remains in a different state.
JOBS: dict[str, tuple[str, ...]] = {
    "running": ("--nodes=2", "--wrap=sleep 600"),
    "failed": ("--wrap=exit 3",),
    "killed": ("--wrap=kill -9 $$",),
    "held": ("--hold", "--wrap=true"),
    "requeued": ("--requeue", "--wrap=sleep 600"),
    "array": ("--array=0-2%1", "--wrap=sleep 600"),
    "components": ("--ntasks=1", ":", "--ntasks=1", "--wrap=sleep 600"),
    "clearing up": ("--open-mode=append", "--wrap=trap '' TERM; while :; do sleep 1; done"),
}


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
    document = json.loads(lab.run(["squeue", "--states=all", "--json"], check=True).stdout)
    jobs = [{field: job[field] for field in FIELDS} for job in document["jobs"]]
    shown = lab.run(["scontrol", "show", "job", "--oneliner"], check=True).stdout
    kept = {"jobs": jobs, **{field: document[field] for field in ("last_update", "errors", "warnings")}}
    return {
        JSON: json.dumps(kept, indent=1) + "\n",
        LINES: lab.run(["squeue", "--states=all", "--noheader", f"--Format={LINE}"], check=True).stdout,
        SHOWN: re.sub(rf" (?!({'|'.join(WORDS)})=)[\w/:]+=\S*", "", shown),
    }


def shape(value: Any) -> Any:
    """Return the names and types in a JSON value, without its values."""
    if isinstance(value, dict):
        return {name: shape(each) for name, each in value.items()}
    if isinstance(value, list):
        return [shape(each) for each in value[:1]]
    return type(value).__name__


if __name__ == "__main__":
    with Lab(chroot=built(), patience=120) as running:
        play(running)
        RECORDED.mkdir(exist_ok=True)
        for file, text in answers(running).items():
            (RECORDED / file).write_text(text)


def wrapped(number: int | None) -> dict[str, Any]:
    """Return a number in the form of 24.11."""
    return {"set": number is not None, "infinite": False, "number": number or 0}


def record_24(job_id: int, states: list[str], reason: str, nodes: str = "", start: int | None = None, code: int = 0,
              signal: int | None = None, array: tuple[int, int | None, str] = (0, None, ""), het: tuple[int, int] = (0, 0),
              restarts: int = 0, description: str = "") -> dict[str, Any]:
    """Return a job in the form of ``squeue --json`` of 24.11 (data_parser/v0.0.42)."""
    return {
        "job_id": job_id, "array_job_id": wrapped(array[0]), "array_task_id": wrapped(array[1]),
        "array_task_string": array[2], "het_job_id": wrapped(het[0]), "het_job_offset": wrapped(het[1]),
        "job_state": states, "state_reason": reason, "state_description": description, "start_time": wrapped(start),
        "nodes": nodes, "restart_cnt": restarts,
        "exit_code": {"status": ["ERROR" if code else "SUCCESS"], "return_code": wrapped(code),
                      "signal": {"id": wrapped(signal), "name": ""}}}
