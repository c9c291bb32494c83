"""``--on slurm`` or ``auto`` inside an allocation: the job script as its step; and the supervisor as a child of any launch."""

import os
import selectors
import signal
import subprocess
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from hpc_mp.base.exit_codes import ending
from hpc_mp.cluster.slurm.allocation import step_environment
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.diagnosis.cause import cause
from hpc_mp.job import AnySpec
from hpc_mp.launch.backends.backend import Launch, concluded
from hpc_mp.launch.backends.interrupts import MEANINGS, Interrupts
from hpc_mp.launch.choices import slurm_gpus
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import Target
from hpc_mp.launch.run_files import Begun, begin
from hpc_mp.launch.staging.archive import stage_environment
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.outcome import STOPPED, Cause, Outcome, State


def _facts(spec: AnySpec, release: Version | None) -> ClusterFacts:
    nodes = tuple(expand(os.environ.get("SLURM_JOB_NODELIST", "")))
    return replace(ask_cluster(spec, release), cpus=None, allocation=nodes)  # the allocation may have fewer CPUs than its nodes


TARGET = Target("in this allocation", _facts, slurm_gpus, in_script=True)


def start(launch: Launch) -> Outcome:
    """Run the script in the allocation that ``SLURM_JOB_ID`` names, to its end. Raises HpcMpError if the run directory cannot be
    written."""
    launch.check(check_model)
    job_id = os.environ["SLURM_JOB_ID"]
    with begin(launch.plan, launch.resumed) as begun:
        stage_environment(launch.plan.spec, launch.listener, begun.run)
        script, log = str(begun.run.script), begun.run.slurm_log(job_id)
        return follow(["bash", script], step_environment(), log, begun, launch, job_id)


POLL_S = 1.0  # between two polls of the child
REPEAT_S = 2.0  # between two signals: of two at the same time, the shell of a job script forwards one
SIGNALS = (signal.SIGUSR2, signal.SIGINT)  # sent to the supervisor at the first and the second interrupt


def follow(argv: Sequence[str], environ: Mapping[str, str], log: Path, begun: Begun, launch: Launch,
           job_id: str | None = None) -> Outcome:
    """Run the supervisor to its end, with progress. The first interrupt saves and stops, the second kills. ``log`` receives its
    output. ``job_id``: the Slurm job of its allocation; None outside of Slurm."""
    launch.listener.say(f"run       {begun.run.path}")
    attempt = AttemptReader(begun.run, begun.attempt)
    with open(log, "ab") as output, Interrupts() as interrupts:
        with launch.listener.following(launch.plan.steps):
            child = subprocess.Popen(argv, env=environ, stdin=subprocess.DEVNULL, stdout=output, stderr=output,
                                     start_new_session=True, pass_fds=[begun.lock])
            code = _until_its_end(child, attempt, interrupts, launch.listener)
        unsaid = Cause("launcher", f"the job {ending(code)}; its log is {log}")

        def guess() -> tuple[State, Cause | None]:
            if code in (0, STOPPED):
                return ("stopped" if code else "completed"), None
            return "failed", cause(begun.run) or unsaid

        return concluded(launch, attempt, job_id, guess)  # an interrupt that comes too late does not end this


def _until_its_end(child: subprocess.Popen[bytes], attempt: AttemptReader, interrupts: Interrupts, listener: Listener) -> int:
    """Show progress and forward interrupts until the child has ended. Return its exit code, or ``STOPPED`` after interrupts."""
    pressed, sent = 0, 0.0
    with selectors.DefaultSelector() as selector:
        selector.register(interrupts, selectors.EVENT_READ)
        while (code := child.poll()) is None:
            selector.select(listener.interval or POLL_S)
            for _ in range(interrupts.received()):
                listener.note(MEANINGS[min(pressed, 1)])
                pressed, sent = pressed + 1, 0.0
            if pressed and time.monotonic() - sent > REPEAT_S:
                child.send_signal(SIGNALS[min(pressed, 2) - 1])
                sent = time.monotonic()
            listener.update(attempt.status(), attempt.steps())
            listener.evaluated(attempt.evaluations())
    listener.evaluated(attempt.evaluations())
    return STOPPED if pressed and code else code
