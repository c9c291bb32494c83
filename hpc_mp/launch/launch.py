"""``hpc_mp.run_job``: plan, place, render and start a job, and return its outcome. ``hpc-mp launch`` is its command line."""

import re
import shlex
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import duration
from hpc_mp.cluster.slurm.allocation import decide
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import AnySpec, JobSpec, ProgramSpec, load_sweep
from hpc_mp.job.inputs import find_files, find_program
from hpc_mp.job.layout import read_config
from hpc_mp.job.sweep import Sweep
from hpc_mp.job.values import seconds_of
from hpc_mp.launch import sweep
from hpc_mp.launch.backends import BACKENDS, BackEnd, Launch
from hpc_mp.launch.depends import NONE
from hpc_mp.launch.listener import Listener, Teller
from hpc_mp.launch.model_check import ModelChecker, check_model
from hpc_mp.launch.plan import JobPlan, TrainingPlan, asked_once, compose, origin_of
from hpc_mp.launch.program.plan import ProgramPlan, compose_program
from hpc_mp.launch.render import JobScript, check_sweep, find_template, site_defaults
from hpc_mp.launch.resume import Resumed, resuming
from hpc_mp.launch.run_files import check_writable, next_run, next_runs, script
from hpc_mp.launch.summary import describe, describe_program, table
from hpc_mp.launch.training_text import TrainingText, check_text, counted_steps, estimated_steps, report_text, tokenizer_of
from hpc_mp.launch.verification import verify_first
from hpc_mp.report.conclude import conclude
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import saved_step
from hpc_mp.rundir.outcome import Outcome, figures, verdict
from hpc_mp.rundir.plan import read_plan
from hpc_mp.runs.status import go_on

ON = ("auto", *(name for name, backend in BACKENDS.items() if backend.named))

# Keys of --set for variables, which may be passwords, also where a sweep or a whole table sets them.
_VARIABLES = re.compile(r"environment\.set\b|program\.environment\b|^\s*(environment|program|sweep)\s*$")


@dataclass(frozen=True, slots=True)
class LaunchRequest:
    """The job to launch, and the options of its launch.

    Attributes:
        job: a job file; or a job made in Python, whose relative paths are relative to the current directory.
        on: Slurm, emulated nodes of this machine or mpirun; "auto" is a step inside a live allocation, else Slurm if it
            answers, else emulated nodes.
        overrides: ``"train.steps=20"`` strings, as ``--set`` takes them.
        wait: True to wait for the end of a Slurm job; all others are always waited for.
        resume: True to resume the run that this job file belongs to, else the newest run of this job, on this or another
            layout.
        slurm_version: the release to write the job script for, in place of the detected one.
    """

    job: Path | AnySpec
    on: str = "auto"
    overrides: tuple[str, ...] = ()
    wait: bool = True
    resume: bool = False
    slurm_version: Version | None = None


@dataclass(frozen=True, slots=True)
class Preview:
    """A launch that was only planned: a plan for every run of a sweep, the first run's directory, its script, its training text
    (None for a program, which has its own), and whether its script would be used or was requested."""

    plans: tuple[JobPlan, ...]
    run: Path
    script: JobScript
    text: TrainingText | None
    used: bool

    def document(self) -> dict[str, Any]:
        """Return the document for ``--json``."""
        return {"run": str(self.run), "state": "planned", "job_id": None, "where": self.plans[0].where.place,
                "template": self.script.template, "script": self.script.text, "explanations": self.script.explanations,
                "choices": self.plans[0].resolution.document(),
                "data": self.text.document() if self.text is not None else None,
                "sweep": [plan.member.values for plan in self.plans if plan.member is not None]}


def run_job(job: Path | str | AnySpec, *, on: str = "auto", overrides: Sequence[str] = (), wait: bool = True,
            resume: bool = False, say: Callable[[str], object] | None = None) -> Outcome:
    """Launch a job and return its outcome; nothing is printed.

    ::

        outcome = hpc_mp.run_job("job.toml", on="local", overrides=["train.steps=20"], say=print)
        if outcome.state == "completed":
            print(outcome.loss, outcome.checkpoint, outcome.report)
        else:
            print(outcome.cause)

    A failed run is an outcome too: its ``state`` is "failed", and ``cause`` has the reason. A first Ctrl-C lets the ranks save
    and stop ("stopped"), a second one kills them; while waiting for a Slurm job, it ends the waiting ("submitted").

    Args:
        job: a job file, or a job made in Python (``JobSpec`` or ``ProgramSpec`` of ``hpc_mp.job``), whose relative paths are
            relative to the current directory.
        on: the back end, as for ``hpc-mp launch --on``: "auto", "slurm", "local" (emulated nodes of this machine) or another.
        overrides: ``"train.steps=20"`` strings, as for ``hpc-mp launch --set``.
        wait: True to wait for the end of a Slurm job; all others are always waited for.
        resume: True to resume the newest run of this job, on this or another layout.
        say: called with every text that ``hpc-mp launch`` would print: the plan, the run's directory, warnings.

    Raises:
        HpcMpError: the job, the machine or the cluster cannot do it; nothing has been started or written.
    """
    request = LaunchRequest(Path(job) if isinstance(job, str) else job, on, tuple(overrides), wait, resume)
    return launch(request, Listener() if say is None else Teller(say))


def launch(request: LaunchRequest, listener: Listener) -> Outcome:
    """Launch like ``run_job``; the listener also gets the progress of the ranks."""
    plans = plan_job(request, partial(counted_steps, listener=listener))
    backend = BACKENDS[plans[0].where.place]
    checks, summary = iter([partial(_check_all, plans, request, listener)]), _summary(plans, backend)  # all before the first run

    def start(plan: JobPlan, text: str | None = None) -> Outcome:
        with _resumed(plan, request) as resumed:
            if text is not None:
                listener.say(text)
            if note := _unfinished(plan, request):
                listener.note(note)
            if resumed is not None and not resumed.left:
                listener.say(f"nothing is left to do: the run has its {plan.steps} steps and their checkpoint"
                             if isinstance(plan, TrainingPlan) else "nothing is left to do: the run is complete")
                attempt, earlier = resumed.run.attempt(), verdict(resumed.run)
                outcome = Outcome(resumed.run.path, "completed", **figures(resumed.run, attempt))
                if earlier is not None and earlier.state == "completed":  # it ended earlier, not now
                    return replace(outcome, report=earlier.report)
                return conclude(outcome, attempt, listener.note)
            return backend.start(Launch((plan,), resumed, request.wait, next(checks, lambda _ask: None), listener))

    if plans[0].spec.sweep.given:
        listener.say(summary)
        outcome = backend.start(Launch(plans, None, request.wait, next(checks), listener))
    elif plans[0].member is not None:
        listener.say(summary)
        outcome = sweep.in_turn(plans, start, listener)
    else:
        outcome = start(plans[0], summary)
    if plans[0].where.missed:
        listener.say(table({"ran": f"{backend.target.title}, not on a cluster: {plans[0].where.missed}"}))
    return outcome


def preview(request: LaunchRequest, listener: Listener) -> Preview:
    """Check everything and render the job script, without starting or writing anything."""
    plans = plan_job(request, estimated_steps)
    check_writable(plans[0].spec)
    with _resumed(plans[0], request) as resumed:
        _check_models(plans, request, listener, check_model)
        backend, text = BACKENDS[plans[0].where.place], launched_text(plans)
        listener.say(_summary(plans, backend, text))
        if note := _unfinished(plans[0], request):
            listener.note(note)
        runs = next_runs(plans if plans[0].spec.sweep.given else plans[:1], resumed)
        rendered = None
        if backend.rehearse is not None:
            rehearsal = backend.rehearse(plans, runs)
            plans, rendered = rehearsal.plans, rehearsal.script
            listener.say(rehearsal.message)
        used = backend.target.in_script or request.slurm_version is not None
        if not used:
            listener.say("script    none here; --on slurm prints that of the same job")
        return Preview(plans, runs[0], script(plans[0], *runs, earlier=rendered), text, used)


def plan_job(request: LaunchRequest, count: Callable[[JobSpec], JobSpec] = estimated_steps) -> tuple[JobPlan, ...]:
    """Return the plan of the job, or of every run of its sweep. Everything is checked except what only transformers knows of
    the model.

    The job of a plan keeps its sweep if the back end starts all runs with one script. ``count``: replaces epochs by steps. Raises
    HpcMpError if a value is wrong, files are missing, or the model, the machine or the cluster does not support the layout.
    """
    if request.on not in ON:
        raise HpcMpError(f"on = {request.on!r}", "is no back end", f"choose one of {', '.join(ON)}")
    project = request.job.absolute().parent if isinstance(request.job, Path) else Path.cwd()
    where, template = decide(request.on), find_template(project)
    backend = BACKENDS[where.place]
    target = asked_once(backend.target)
    runs = load_sweep(request.job, request.overrides, site_defaults(project),
                      lambda spec: target.fits(spec, target.facts(spec, request.slurm_version)))
    placed, together = sweep.places(runs[0]), backend.arrays and len(runs) > 1
    runs = tuple(count(run) if isinstance(run, JobSpec) else run for run in runs)
    resumed_runs = sweep.resumable(request.job, runs[0], placed) if request.resume else [None] * len(runs)
    if request.resume and placed != [None]:
        sweep.check_resumable(resumed_runs, runs[0], together)
    depends = backend.depends(runs[0]) if backend.depends is not None else NONE
    plans: list[JobPlan] = []
    for job, member, resumed in zip(runs, placed, resumed_runs, strict=True):
        earlier = read_plan(resumed) if resumed is not None else None
        plan: JobPlan = (compose(job, where, target, request.slurm_version, earlier, resumed) if isinstance(job, JobSpec)
                         else compose_program(job, where, target, request.slurm_version, resumed))
        run_spec = plan.spec if together else plan.spec.model_copy(update={"sweep": Sweep()})
        plans.append(replace(plan, spec=run_spec, template=template, member=member, depends=depends))
        find_program(job.notify.command)
    check_sweep([plan.spec for plan in plans])
    return tuple(plans)


def launched_text(plans: Sequence[JobPlan]) -> TrainingText | None:
    """Return the training text of the first plan, None for programs; the texts of the other runs of its sweep are checked too.
    Raises HpcMpError if a text cannot be read, or does not fit the model."""
    trained = [plan for plan in plans if isinstance(plan, TrainingPlan)]
    if not trained:
        return None
    texts = {(plan.spec.data, plan.spec.evaluate.files, plan.spec.model.pretrained, plan.shape.vocabulary): plan
             for plan in trained}
    for plan in list(texts.values())[1:]:
        check_text(plan.spec, plan.shape.vocabulary)
    return report_text(trained[0].spec, trained[0].shape.vocabulary)


def again(request: LaunchRequest, run: Path) -> str:
    """Return the command that resumes a run of this request. Values of variables are left out: they may be passwords."""
    if isinstance(request.job, AnySpec):
        return go_on(RunDirectory(run))
    shown = ((text.partition("=")[0], text) for text in request.overrides)
    return shlex.join(["hpc-mp", "launch", str(request.job), *(["--on", request.on] if request.on != "auto" else []),
                       *(f"--set={key}=…" if _VARIABLES.search(key) else f"--set={text}" for key, text in shown), "--resume"])


def _resumed(plan: JobPlan, request: LaunchRequest) -> AbstractContextManager[Resumed | None]:
    """Hold and yield the run to resume; None for a new run, such as a run of a sweep that was not started."""
    new = not request.resume or (plan.member is not None and plan.resumes is None)
    return nullcontext() if new else resuming(plan.spec, plan.resumes)


def _summary(plans: Sequence[JobPlan], backend: BackEnd, text: TrainingText | None = None) -> str:
    """Return the plan in words; for a sweep the first run's, and the values of all."""
    first, title = plans[0], backend.target.title
    if isinstance(first, ProgramPlan):
        description = describe_program(first, title)
    else:
        assert isinstance(first, TrainingPlan)
        description = describe(first, title, text or launched_text(plans))
    depends = [f"depends   {line}" for line in first.depends.words]
    swept = [] if first.member is None else [sweep.rows(plans, backend.arrays)]
    return "\n".join((description, *_time_remark(first.spec.job.time_limit), *depends, *swept))


def _time_remark(limit: str) -> list[str]:
    """Return a row on a limit of one or two numbers, which Slurm counts in minutes and seconds but users may mean as hours."""
    match, seconds = re.fullmatch(r"(\d{1,3})(:\d\d?)?", limit), seconds_of(limit)
    if match is None or seconds is None:
        return []
    hours = f"{int(match[1]):02d}{match[2] or ':00'}:00"
    return [table({"limit": f'job.time_limit = {limit} is {duration(seconds)}, as Slurm counts; hours are written "{hours}"'})]


def _unfinished(plan: JobPlan, request: LaunchRequest) -> str:
    """Return a note that the job's newest run has not been completed, with the command that resumes it; else an empty string."""
    new = next_run(plan.spec)
    run = RunDirectory(new.with_name(f"{int(new.name) - 1:04d}"))
    ended = None if request.resume or plan.member is not None else verdict(run)
    goes_on = plan.spec.program.resumes if isinstance(plan.spec, ProgramSpec) else bool(saved_step(run))
    if ended is None or ended.state not in ("stopped", "failed") or not goes_on:
        return ""
    steps = figures(run, run.attempt())["steps"]
    progress = f" at step {steps}{f'/{plan.steps}' if plan.steps else ''}" if steps else ""
    return f"note: run {run.path.name} of this job {ended.state}{progress}, and this is a new one from the beginning; " \
           f"to resume that run: {again(request, run.path)}"


def _check_all(plans: Sequence[JobPlan], request: LaunchRequest, listener: Listener, ask: ModelChecker) -> None:
    """Check the models, and verify new runs."""
    _check_models(plans, request, listener, ask)
    if not request.resume:
        verify_first([plan.spec for plan in plans if isinstance(plan, TrainingPlan)], listener)


def _check_models(plans: Sequence[JobPlan], request: LaunchRequest, listener: Listener, ask: ModelChecker) -> None:
    """Ask transformers about the models; a resumed run keeps its tokenizer unchecked."""
    for plan in (plan for plan in plans if isinstance(plan, TrainingPlan)):
        config = read_config(plan.user_spec)
        resume = plan.user_spec.checkpoint.resume
        origin = str(origin_of(Path(resume))) if resume is not None else None
        tokenizer = None if request.resume else tokenizer_of(plan.user_spec)
        files = [str(path) for path in find_files(plan.user_spec.data.files)]
        for text in ask(config, plan.shape.vocabulary, origin, None if tokenizer is None else str(tokenizer), files,
                        plan.user_spec.data.form):
            listener.note(f"warning: {text}")
