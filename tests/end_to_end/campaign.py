"""A campaign of random faults on a lab of six hosts: does every run end by itself with the numbers of an undisturbed one?

    .venv/bin/python tests/end_to_end/campaign.py --faults 200 --seed 1 [--job program]

Kinds, moments and hosts of the faults are drawn by the seed, several for each run. A run is right if it completes without help,
its losses, its gradient norms and its last checkpoint equal the undisturbed run's to the last bit, each step stands once in
``metrics.jsonl``, and every end of an attempt names a host that was hit then, or is no failure because the job was asked to go.
"""

import argparse
import hashlib
import random
import re
import shutil
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

sys.path.insert(0, str(Path(__file__).parents[1]))
sys.path.insert(0, str(Path(__file__).parents[1] / "support"))

from campaign_faults import FAULTS, SETTINGS, Planted, Scene
from lab_runs import before_steps, saving, state
from slurm_jobs import launch, submit, write_job
from slurm_lab.cluster import Cluster
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.rundir import RunDirectory, read_attempt, read_json, read_lines

NODES, EVERY, STEPS_PER_FAULT = 4, 10, 20
PACE = "def before(self, step): time.sleep(0.15)"  # steps take long enough for a fault to come between two of them
PATIENCE = 420.0  # seconds until a run that comes no further is given up
HELD, LOOK = "launch failed requeued held", 10.0
"""The reason of a job that Slurm holds for ever: its controller was killed before it had saved the start, starts the job
again while the node still ends it, and takes that refusal for a failed launch. No process of the run is left by then."""
LATE = 180.0  # seconds in which Slurm kills new ranks on a host that was cut off, with what it takes for the rest of old ones
MOMENTS = ("step", "step", "save", "start", "queued")
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "PREEMPTED", "OUT_OF_MEMORY", "")
ENGINE = (f"job.nodes={NODES}", "job.ranks_per_node=1", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=2",
          "train.dropout=0.1", f"checkpoint.every={EVERY}", "checkpoint.keep=2", "slurm.retries=20", "job.heartbeat_timeout=15",
          "train.global_batch=4", "environment.health=false")
SIGNALS = {"engine": "USR2", "program": "TERM"}
PROGRAM = table(__file__, "campaign.toml", "job")


@dataclass
class Trial:
    """One run: what was planted, what was wrong, and how often a job that Slurm held was released. ``recoveries``: kind, seconds
    to the first new step, steps trained again."""

    planted: list[Planted] = field(default_factory=list)
    recoveries: list[tuple[str, float, int]] = field(default_factory=list)
    wrong: list[str] = field(default_factory=list)
    attempts: int = 0
    released: int = 0


def write(directory: Path, kind: str, steps: int) -> Path:
    """The job file of a run, on the file system that all hosts share."""
    job = write_job(directory)
    before_steps(directory, PACE)
    if kind == "program":
        program = shutil.copy(Path(__file__).with_name("campaign_program.py"), directory)
        job.write_text(PROGRAM.format(nodes=NODES, python=sys.executable, program=program, steps=steps, every=EVERY))
    return job


def overrides(job: Path, kind: str, steps: int) -> tuple[str, ...]:
    return (*ENGINE, f"train.steps={steps}", f"environment.set.PYTHONPATH={job.parent}") if kind == "engine" else ()


def saved(run: RunDirectory) -> dict[str, str]:
    """Hashes of what the run has in the end: the tensors of its last checkpoint, or a program's own file."""
    files = sorted(max(run.checkpoints.glob("step*"), default=run.path).rglob("*.safetensors")) or [run.path / "state.pt"]
    return {file.name: hashlib.sha256(file.read_bytes()).hexdigest() for file in files if file.exists()}


def numbers(run: RunDirectory) -> list[tuple[int, float, float]]:
    return [(line["step"], line["loss"], line["grad_norm"]) for line in read_lines(run.metrics)]


class Campaign:
    """Runs on one lab, each compared with the undisturbed one."""

    def __init__(self, lab: Cluster, kind: str, steps: int, draw: random.Random, say: Callable[[str], None]) -> None:
        self.lab, self.kind, self.steps, self.draw, self.say = lab, kind, steps, draw, say
        job = write(lab.share / "undisturbed", kind, steps)
        run = RunDirectory(Path(launch(lab, job, overrides(job, kind, steps), timeout=600)["run"]))
        self.numbers, self.saved = numbers(run), saved(run)
        assert [step for step, _, _ in self.numbers] == list(range(1, steps + 1))

    def trial(self, number: int, kinds: Sequence[str]) -> Trial:
        """A run that meets these faults, one after the other."""
        job = write(self.lab.share / f"run{number}", self.kind, self.steps)
        run, job_id = submit(self.lab, job, overrides(job, self.kind, self.steps))
        trial = Trial()
        for kind in kinds:
            if not self._meets(run, job_id, kind, trial):
                break
        self._wait(run, job_id, lambda: False, trial, "the end")
        self._judge(run, job_id, trial)
        if trial.wrong:  # the lab's own files go with it
            self.say(f"  kept in {shutil.copytree(run.path, Path(tempfile.mkdtemp(prefix='campaign-')) / 'run')}")
        self.lab.mend()
        return trial

    def _wait(self, run: RunDirectory, job_id: str, ready: Callable[[], object], trial: Trial, what: str,
              scene: Scene | None = None) -> bool:
        """Until ``ready``; False if the run has ended, or comes no further."""
        deadline, last, looked = time.monotonic() + PATIENCE, None, time.monotonic()
        while not ready():
            if scene:
                scene.mend()
            if run.outcome.exists() and state(self.lab, job_id) in ENDED and ended(run):
                return False
            reached = newest_attempt(run), len(read_lines(run.metrics))
            if reached != last:
                deadline, last = time.monotonic() + PATIENCE, reached
            if time.monotonic() - looked > LOOK:
                looked = time.monotonic()
                if HELD in self.lab.run(["squeue", "--noheader", "--format=%r", "--jobs", job_id]).stdout:
                    trial.released += 1
                    self.lab.run(["scontrol", "release", job_id])
            if time.monotonic() > deadline:
                trial.wrong.append(f"came no further while {what} was awaited ({state(self.lab, job_id)})")
                return False
            time.sleep(0.1)
        return True

    def _meets(self, run: RunDirectory, job_id: str, kind: str, trial: Trial) -> bool:
        """Plant one fault at a drawn moment and wait until the run trains again; False if that cannot be."""
        moment = self.draw.choice(MOMENTS)
        begun = len(read_lines(run.metrics))
        ahead = self.draw.randrange(1, STEPS_PER_FAULT)
        ready: dict[str, Callable[[], object]] = {
            "step": lambda: len(read_lines(run.metrics)) >= begun + ahead,
            "save": lambda: len(read_lines(run.metrics)) > begun and (self.kind == "program" or saving(run)),
            "start": lambda: self._ranks_are_there(run),
            "queued": lambda: state(self.lab, job_id) in ("PENDING", "CONFIGURING", "COMPLETING", "RUNNING"),
        }
        if not self._wait(run, job_id, ready[moment], trial, moment):
            return False
        if moment in ("start", "queued"):
            time.sleep(self.draw.uniform(0, 6))
        attempt, begun_on = newest_attempt(run)
        scene = Scene(self.lab, job_id, begun_on or self.lab.nodes, self.draw, SIGNALS[self.kind])
        step = max((line["step"] for line in read_lines(run.metrics)), default=0)
        hosts = FAULTS[kind].plant(scene)
        if hosts is None:  # nothing was there that it could hit
            return True
        trial.planted.append(Planted(kind, moment, hosts, time.time(), step, attempt))
        self.say(f"  {kind} at {moment}, step {step}, attempt {attempt} {' '.join(hosts)}")
        if self.draw.random() < 0.2:  # the next one comes before this one is over
            time.sleep(self.draw.uniform(0, 20))
            scene.mend(all_of_it=True)
            return True

        reached = [step]

        def again() -> bool:
            lines = read_lines(run.metrics)
            reached.extend(line["step"] for line in lines[-1:] if line["attempt"] <= attempt)
            return any(line["attempt"] > attempt for line in lines) if FAULTS[kind].ends else len(lines) > step + 3

        back = self._wait(run, job_id, again, trial, f"a step after {kind}", scene)
        if back and FAULTS[kind].ends:
            first = min(line["step"] for line in read_lines(run.metrics) if line["attempt"] > attempt)
            trial.recoveries.append((kind, time.time() - trial.planted[-1].time, max(reached) + 1 - first))
        scene.mend(all_of_it=True)
        return back

    def _ranks_are_there(self, run: RunDirectory) -> bool:
        return any(Scene(self.lab, "", (), self.draw).ranks(host) for host in newest_attempt(run)[1])

    def _judge(self, run: RunDirectory, job_id: str, trial: Trial) -> None:
        ends = read_lines(run.history)
        trial.attempts = len(ends)
        outcome = read_json(run.outcome)["state"] if run.outcome.exists() else "without an outcome"
        if outcome != "completed":
            trial.wrong.append(f"is {outcome}, job {state(self.lab, job_id)}: {ends[-1]['message'] if ends else ''}")
            return
        if numbers(run) != self.numbers:
            trial.wrong.append("other losses, norms or steps")
        if saved(run) != self.saved:
            trial.wrong.append("another last checkpoint")
        for end in ends:
            trial.wrong += wrong_end(end, trial.planted)


def wrong_end(end: dict[str, Any], planted: Sequence[Planted]) -> list[str]:
    """Why the end of an attempt is unnamed or misnamed, if it is: by the faults of this attempt, the one before, and ``LATE``."""
    near = [fault for fault in planted if end["attempt"] - 1 <= fault.attempt <= end["attempt"]
            or 0 <= end["time"] - fault.time < LATE]
    if "controller" in end["message"] and any(fault.kind == "slurmctld killed" for fault in near):
        return []
    if end["kind"] == "completed":
        return []
    if end["kind"] == "stopped":
        asked = any(FAULTS[fault.kind].asks for fault in near)
        return [] if asked else [f"misnamed end of attempt {end['attempt']}: nobody asked for its stop: {end['message'][:150]}"]
    named = {end["node"], *end["nodes"], *re.findall(r"\bn\d+\b", end["message"])} - {None}
    hit = {host for fault in near for host in fault.hosts}
    if not named:
        return [f"unnamed end of attempt {end['attempt']}: {end['kind']}: {end['message'][:150]}"]
    blamed = {end["node"], *end["nodes"]} - {None} or named
    return [] if blamed & hit else [f"misnamed end of attempt {end['attempt']}: {end['kind']}: {end['message'][:150]}"]


def newest_attempt(run: RunDirectory) -> tuple[int, tuple[str, ...]]:
    """Return the number and the hosts of the newest attempt; 0 and none before the first one, and while it is written."""
    try:
        record = read_attempt(run.attempt_record)
    except (OSError, ValueError):
        return 0, ()
    return record.attempt, record.hosts


def ended(run: RunDirectory) -> bool:
    """Return True if the newest attempt has a verdict that nothing follows."""
    ends = read_lines(run.history)
    return bool(ends) and ends[-1]["action"] in ("done", "fail")


def drawn(faults: int, per_run: int, draw: random.Random) -> list[list[str]]:
    """Kinds for each run: every kind equally often, in a drawn order."""
    kinds = [kind for _ in range(faults // len(FAULTS) + 1) for kind in draw.sample(list(FAULTS), len(FAULTS))][:faults]
    return [kinds[begin:begin + per_run] for begin in range(0, faults, per_run)]


def campaign(faults: int, seed: int, kind: str, per_run: int = 8, say: Callable[[str], None] = print) -> list[Trial]:
    draw = random.Random(seed)
    with Lab(6, overrides=SETTINGS) as lab:
        runs = Campaign(lab, kind, STEPS_PER_FAULT * per_run, draw, say)
        trials = []
        for number, kinds in enumerate(drawn(faults, per_run, draw), 1):
            say(f"run {number}: {', '.join(kinds)}")
            trials.append(runs.trial(number, kinds))
            say(f"  {trials[-1].attempts} attempts; " + ("; ".join(trials[-1].wrong) or "right"))
        return trials


def summary(trials: Sequence[Trial]) -> str:
    faults, attempts, released, right = (sum(numbers) for numbers in zip(*(
        (len(trial.planted), trial.attempts, trial.released, not trial.wrong) for trial in trials), strict=True))
    wrong = [f"run {number}: {words}" for number, trial in enumerate(trials, 1) for words in trial.wrong]
    counts = f"{faults} faults, {attempts} attempts, {released} jobs released, {right} of {len(trials)} runs right"
    by_kind: dict[str, list[tuple[float, int]]] = {}
    for kind, *figures in sorted(recovery for trial in trials for recovery in trial.recoveries):
        by_kind.setdefault(kind, []).append(tuple(figures))
    rows = [f"{kind}: {len(rows)} times, a new step after {median(s for s, _ in rows):.0f} s (at most {max(rows)[0]:.0f}), "
            f"{sum(n for _, n in rows)} steps again" for kind, rows in by_kind.items()]
    return "\n".join([counts, *rows, *wrong])


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--faults", type=int, default=20)
    parser.add_argument("--per-run", type=int, default=8)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--job", choices=("engine", "program"), default="engine")
    words = parser.parse_args()
    trials = campaign(words.faults, words.seed, words.job, words.per_run, lambda text: print(text, flush=True))
    print(summary(trials))
    return int(any(trial.wrong for trial in trials))


if __name__ == "__main__":
    sys.exit(main())
