"""A sweep from its launch to its end: the values of its runs, the runs one after the other, and the best of them."""

import textwrap
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import counted, loss_number
from hpc_mp.job import AnySpec
from hpc_mp.job.sweep import runs_of, summary_of, words_of
from hpc_mp.launch.listener import Listener
from hpc_mp.launch.plan import JobPlan, newest_run
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import complete, saved_step
from hpc_mp.rundir.outcome import Outcome, together
from hpc_mp.rundir.records import Evaluation, last_records
from hpc_mp.rundir.retention import best_evaluation
from hpc_mp.rundir.runs import SweepMember, best_of, is_run, members
from hpc_mp.runs.status import RunStatus

MOST_SHOWN = 20  # maximum of runs that a summary lists
IN_TURN = "one after the other here"


def places(spec: AnySpec) -> list[SweepMember | None]:
    """Return the place of each run in the sweep of a job file, in order; ``[None]`` for a job without a sweep. ``first`` is
    unknown until the first run has a directory."""
    runs = runs_of(spec.sweep)
    return [SweepMember("", number, len(runs), values) for number, values in enumerate(runs)] or [None]


def resumable(job: Path | AnySpec, spec: AnySpec, placed: Sequence[SweepMember | None]) -> list[RunDirectory | None]:
    """Return, for each run of a launch with ``--resume``, the run to resume; None if it does not exist. The job file of a run
    selects that run. Another job file selects the newest run of its name, or, for a sweep, the runs of its newest sweep with the
    same values."""
    folder = job.resolve().parent if isinstance(job, Path) else None
    if folder is not None and folder.parent == (Path(spec.job.directory) / spec.job.name).resolve() and is_run(folder):
        return [RunDirectory(folder)]
    newest = newest_run(spec)
    if placed == [None] or newest is None:
        return [newest] * len(placed)
    sweep_runs = members(newest)
    return [next((run for run, member in sweep_runs.items() if place is not None and member.values == place.values), None)
            for place in placed]


def check_resumable(runs: Sequence[RunDirectory | None], spec: AnySpec, together: bool) -> None:
    """Refuse to resume a sweep without any existing run, or, if one script starts the runs ``together``, any sweep."""
    base = Path(spec.job.directory) / spec.job.name
    if not any(runs):
        raise HpcMpError(f"--resume of job {spec.job.name!r}", f"there is no run with these values in the newest sweep of {base}",
                         "launch it without --resume, or mend [sweep]")
    if together:
        raise HpcMpError("--resume", "goes on with one run, and [sweep] makes several",
                         f"name the job file of the run: hpc-mp launch {base}/NNNN/job.toml --resume; `hpc-mp status` lists them")


def rows(plans: Sequence[JobPlan], side_by_side: bool) -> str:
    """Return the runs of a sweep, for the summary of a launch. ``side_by_side``: True if they can run at the same time."""
    sweep, placed = plans[0].user_spec.sweep, [plan.member for plan in plans if plan.member is not None]
    limit = sweep.simultaneous
    order = IN_TURN if not side_by_side else f"at most {limit} at once" if limit else "as many at once as Slurm finds room for"
    lines = [f"{member.number + 1:>3}  {words_of(member.values) or 'the job file as it is'}{note}"
             for member, note in zip(placed[:MOST_SHOWN], _gone(plans[:MOST_SHOWN]), strict=True)]
    if hidden := len(placed) - MOST_SHOWN:
        lines += [f"     and {counted(hidden, 'other')}"] if hidden > 0 else []
    head = f"{summary_of(sweep, runs_of(sweep))}; {order}"
    return f"sweep     {head}\n" + textwrap.indent("\n".join(lines), " " * 10)


def _gone(plans: Sequence[JobPlan]) -> Iterator[str]:
    """Yield the existing state of each run, if the sweep is resumed."""
    resumed = any(plan.resumes is not None for plan in plans)
    for plan in plans:
        if plan.resumes is None:
            yield ": a new run" if resumed else ""
        elif complete(plan.resumes, plan.spec):
            yield f": {plan.resumes.path.name} is complete"
        else:
            saved = saved_step(plan.resumes)
            yield f": {plan.resumes.path.name} goes on" + (f" from step {saved + 1:,}" if saved else "")


def in_turn(plans: Sequence[JobPlan], start: Callable[[JobPlan], Outcome], listener: Listener) -> Outcome:
    """Run a sweep one run after the other. A run that fails, or is cancelled individually, is followed by the next one. An
    interrupt, or ``cancel --all``, ends the sweep. ``start``: starts a run and follows it to its end."""
    ended: list[Outcome] = []
    placed = _joined(plans)
    first = placed[0].first
    if first:  # an earlier `cancel --all` is over: this launch resumes the sweep
        RunDirectory(
            Path(plans[0].user_spec.job.directory) / plans[0].user_spec.job.name / first).sweep_stop.unlink(missing_ok=True)
    for position, (plan, member) in enumerate(zip(plans, placed, strict=True), 1):
        listener.say(f"sweep     run {position} of {len(plans)}: {words_of(member.values) or 'the job file as it is'}")
        outcome = start(replace(plan, member=replace(member, first=first)))
        ended.append(outcome)
        first = first or outcome.run.name
        listener.say(f"ended     {_words(outcome)}")
        base = outcome.run.parent / first
        if RunDirectory(base).sweep_stop.exists() or (outcome.state == "stopped" and not RunDirectory(outcome.run).stop.exists()):
            break
    combined = together(ended)
    remaining = len(plans) - len(ended)
    if not remaining:
        return combined
    listener.say(f"sweep     {counted(remaining, 'run')} not started; --resume starts {'them' if remaining > 1 else 'it'}")
    return replace(combined, state="stopped" if combined.state == "completed" else combined.state, not_started=remaining)


def _joined(plans: Sequence[JobPlan]) -> list[SweepMember]:
    """Return the places of these runs. In a resumed sweep, existing runs keep their places, and new values become new runs after
    the others, so that it is compared as one sweep."""
    placed = [plan.member for plan in plans if plan.member is not None]
    existing = next((members(plan.resumes) for plan in plans if plan.resumes is not None), {})
    if not existing:
        return placed
    old_places = [None if plan.resumes is None else existing.get(plan.resumes) for plan in plans]
    first, of = next(iter(existing.values())).first, len(existing) + old_places.count(None)
    numbers = count(1 + max(place.number for place in existing.values()))
    return [replace(member, first=first, number=next(numbers) if old is None else old.number, of=of)
            for member, old in zip(placed, old_places, strict=True)]


def _words(outcome: Outcome) -> str:
    loss = f", loss {loss_number(outcome.loss)} after step {outcome.steps}" if outcome.loss is not None else ""
    newest = last_records(RunDirectory(outcome.run).evaluations, Evaluation, 1)
    held_out = f", held out {newest[-1].words}" if newest else ""
    cause = f": {outcome.cause.message}" if outcome.cause is not None else ""
    return f"{outcome.run} {outcome.state}{loss}{held_out}{cause}"


def best_runs(statuses: Sequence[RunStatus]) -> Mapping[Path, str]:
    """Return the best run of each listed sweep that has ended, with the criterion."""
    sweeps: dict[tuple[Path, str], list[RunStatus]] = {}
    for status in statuses:
        if status.sweep is not None:
            sweeps.setdefault((status.run.parent, status.sweep.first), []).append(status)
    winners = {}
    for runs in sweeps.values():
        held_out = ((status.best.evaluation if status.best else None, status.evaluation) for status in runs)
        best_ones = (best_evaluation([evaluation for evaluation in pair if evaluation]) for pair in held_out)
        numbers = zip((status.loss for status in runs), best_ones, strict=True)
        best = best_of(numbers) if all(status.ended for status in runs) else None
        if best is not None:
            winners[runs[best[0]].run] = best[1]
    return winners
