"""``hpc_mp.run_job``: plan, place, render and start a job, and say what became of it. ``hpc-mp launch`` is its command line."""

from __future__ import annotations

import shlex
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.inside import decide
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import JobSpec, load_array
from hpc_mp.job.inputs import find_program
from hpc_mp.launch.backends import BACKENDS, Launch
from hpc_mp.launch.listener import Listener, Teller
from hpc_mp.launch.model_check import ModelChecker, check_model
from hpc_mp.launch.plan import JobPlan, asked_once, compose, newest_run, origin_of
from hpc_mp.launch.render import JobScript, check_array, find_template, site_defaults
from hpc_mp.launch.resume import Resumed, resuming
from hpc_mp.launch.run_files import next_runs, script
from hpc_mp.launch.summary import describe
from hpc_mp.launch.training_text import TrainingText, check_text, counted_steps, estimated_steps, report_text
from hpc_mp.layout.models import read_config
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.outcome import Outcome, figures
from hpc_mp.rundir.plan import read_plan

ON = ("auto", *(name for name, backend in BACKENDS.items() if backend.named))


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """What is to be launched, and how.

    Attributes:
        job: a job file; or a job made in Python, whose relative paths are seen from the current directory.
        on: Slurm, emulated nodes of this machine or mpirun; "auto" is a step inside a live allocation, else Slurm if it
            answers, else emulated nodes.
        overrides: ``"train.steps=20"`` strings, as ``--set`` takes them.
        wait: whether to wait for the end of a Slurm job; all others are always waited for.
        resume: go on with the newest run of this job, on this or another layout.
        slurm_version: the release to write the job script for, in place of the one found.
    """

    job: Path | JobSpec
    on: str = "auto"
    overrides: tuple[str, ...] = ()
    wait: bool = True
    resume: bool = False
    slurm_version: Version | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """What a launch would start: a plan for every element of an array, the first run's directory, the script of all, and what the
    first one trains on."""

    plans: tuple[JobPlan, ...]
    run: Path
    script: JobScript
    text: TrainingText

    def document(self) -> dict[str, Any]:
        """For ``--json``."""
        return {"run": str(self.run), "state": "planned", "job_id": None, "where": self.plans[0].where.place,
                "template": self.script.template, "script": self.script.text, "explanations": self.script.explanations,
                "choices": self.plans[0].resolution.document(), "data": self.text.document()}


def run_job(
    job: Path | str | JobSpec, *, on: str = "auto", overrides: Sequence[str] = (), wait: bool = True, resume: bool = False,
    say: Callable[[str], object] | None = None,
) -> Outcome:
    """Launch a job and return what became of it; nothing is printed.

    ::

        outcome = hpc_mp.run_job("job.toml", on="local", overrides=["train.steps=20"], say=print)
        if outcome.state == "completed":
            print(outcome.loss, outcome.checkpoint, outcome.report)
        else:
            print(outcome.cause)

    A run that fails is an outcome too: its ``state`` is "failed", and ``cause`` says why. A first Ctrl-C lets the ranks save
    and stop ("stopped"), a second one kills them; while a Slurm job is waited for it ends the waiting ("submitted").

    Args:
        job: a job file, or a job made in Python (``hpc_mp.job.JobSpec``), whose relative paths are seen from the current
            directory.
        on: where, as ``hpc-mp launch --on`` takes it: "auto", "slurm", "local" (emulated nodes of this machine) or another.
        overrides: ``"train.steps=20"`` strings, as ``hpc-mp launch --set`` takes them.
        wait: whether to wait for the end of a Slurm job; all others are always waited for.
        resume: go on with the newest run of this job, on this or another layout.
        say: called with every text that ``hpc-mp launch`` would print: the plan, where the run lies, warnings.

    Raises:
        HpcMpError: the job, the machine or the cluster cannot do it; nothing has been started or written.
    """
    request = LaunchRequest(Path(job) if isinstance(job, str) else job, on, tuple(overrides), wait, resume)
    return launch(request, Listener() if say is None else Teller(say))


def launch(request: LaunchRequest, listener: Listener) -> Outcome:
    """As ``run_job``; the listener also gets the progress of the ranks."""
    plans = plan_job(request, partial(counted_steps, listener=listener))
    backend = BACKENDS[plans[0].where.place]
    if len(plans) > 1 and request.resume:
        raise HpcMpError("--resume", "goes on with one run, and slurm.array makes several",
                         "launch the element that you want to go on with as a job of its own")
    with _resumed(plans[0], request) as resumed:
        listener.say(describe(plans[0], backend.target.title, launched_text(plans)))
        if resumed is not None and not resumed.left:
            listener.say(f"nothing is left to do: the run has its {plans[0].spec.train.steps} steps and their checkpoint")
            done = resumed.run.attempt()
            return conclude(Outcome(resumed.run.path, "completed", **figures(resumed.run, done)), done, listener.note)
        outcome = backend.start(Launch(plans, resumed, request.wait, _check_models(plans, listener), listener))
        if plans[0].where.missed:
            listener.say(f"ran       {backend.target.title}, not on a cluster: {plans[0].where.missed}")
        return outcome


def preview(request: LaunchRequest, listener: Listener) -> Preview:
    """Check everything and render the job script; start and write nothing."""
    plans = plan_job(request, estimated_steps)
    with _resumed(plans[0], request) as resumed:
        _check_models(plans, listener)(check_model)
        backend, text = BACKENDS[plans[0].where.place], launched_text(plans)
        listener.say(describe(plans[0], backend.target.title, text))
        runs = next_runs(plans, resumed)
        rendered = script(plans[0], *runs)
        if backend.rehearse is not None:
            listener.say(backend.rehearse(plans[0], rendered.text))
        return Preview(plans, runs[0], rendered, text)


def plan_job(request: LaunchRequest, count: Callable[[JobSpec], JobSpec] = estimated_steps) -> tuple[JobPlan, ...]:
    """The plan of the job, or of every element of its array where the back end takes arrays; checked, but for what only
    transformers knows of its model.

    Args:
        count: puts steps in place of epochs.

    Raises:
        HpcMpError: a value that is wrong, files that are not there, a layout that the model, the machine or the cluster
            does not have.
    """
    if request.on not in ON:
        raise HpcMpError(f"on = {request.on!r}", "is no back end", f"choose one of {', '.join(ON)}")
    project = request.job.absolute().parent if isinstance(request.job, Path) else Path.cwd()
    where, template = decide(request.on), find_template(project)
    backend = BACKENDS[where.place]
    target = asked_once(backend.target)
    elements = load_array(request.job, request.overrides, site_defaults(project),
                          lambda spec: target.fits(spec, target.facts(spec, request.slurm_version)))
    if not backend.arrays:
        elements = elements[:1]
    elements = tuple(map(count, elements))
    resumed = newest_run(elements[0]) if request.resume else None
    earlier = read_plan(resumed) if resumed is not None else None
    plans = tuple(replace(compose(given, where, target, request.slurm_version, earlier, resumed), template=template)
                  for given in elements)
    check_array([plan.spec for plan in plans])
    for element in elements:
        find_program(element.notify.command)
    return plans


def launched_text(plans: Sequence[JobPlan]) -> TrainingText:
    """What the first plan trains on; the text of the others, which are elements of its array, is checked too. Raises
    HpcMpError."""
    texts = {(plan.spec.data, plan.spec.evaluate.files, plan.spec.model.pretrained, plan.shape.vocabulary): plan
             for plan in plans}
    for plan in list(texts.values())[1:]:
        check_text(plan.spec, plan.shape.vocabulary)
    return report_text(plans[0].spec, plans[0].shape.vocabulary)


def again(request: LaunchRequest, run: Path) -> str:
    """The command that goes on with a run of this request. Values of variables are left out: they may be passwords."""
    on = ["--on", request.on] if request.on != "auto" else []
    if isinstance(request.job, JobSpec):
        return shlex.join(["hpc-mp", "launch", str(RunDirectory(run).job), *on, "--resume"])
    return shlex.join(["hpc-mp", "launch", str(request.job), *on, *(f"--set={_shown(text)}" for text in request.overrides),
                       "--resume"])


def alone(request: LaunchRequest, run: Path, saved: Path | None) -> str:
    """The command that carries an element of an array on as a job of its own, from its checkpoint if it has one."""
    on = ["--on", request.on] if request.on != "auto" else []
    state = [f"--set=checkpoint.resume={run}"] if saved is not None else []
    return shlex.join(["hpc-mp", "launch", str(RunDirectory(run).job), *on, "--set=slurm.array=[]", *state])


def _shown(override: str) -> str:
    key, _, _ = override.partition("=")
    return f"{key}=…" if key.strip().startswith("environment") else override


@contextmanager
def _resumed(plan: JobPlan, request: LaunchRequest) -> Iterator[Resumed | None]:
    """The run to go on with, held; None for a new one."""
    if not request.resume:
        yield None
        return
    with resuming(plan.spec) as resumed:
        yield resumed


def _check_models(plans: Sequence[JobPlan], listener: Listener) -> Callable[[ModelChecker], None]:
    """What asks transformers about the models."""

    def check(ask: ModelChecker) -> None:
        for plan in plans:
            config = read_config(plan.given)
            resume = plan.given.checkpoint.resume
            origin = str(origin_of(Path(resume))) if resume is not None else None
            for text in ask(config, plan.shape.vocabulary, origin):
                listener.note(f"warning: {text}")

    return check
