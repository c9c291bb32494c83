"""The report page: facts in, one self-contained HTML file out."""

import shlex
import time
from pathlib import Path

from hpc_mp.job import Spec, dump_job
from hpc_mp.layout.placement import Placement, reach_of
from hpc_mp.report import curves, gantt, grid, memory
from hpc_mp.report.facts import RunFacts, read_facts
from hpc_mp.report.html import HERE, filled, publish
from hpc_mp.report.summary import attempts, key_numbers, name, summarize
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import RankStart

HIDDEN = "(hidden)"


def write_report(run: RunDirectory, page: Path | None = None) -> Path:
    """Write ``report.html``, or another ``page``, from the content of the run directory. Raises HpcMpError if the page cannot be
    written."""
    return publish(page or run.report, render(read_facts(run), time.time()))


def render(facts: RunFacts, now: float) -> str:
    """Return the page as of ``now`` (unix seconds). All text from the run is escaped."""
    summary = summarize(facts)
    placement, spec = facts.placement, facts.spec
    has_axes = facts.program is None or facts.program.program.axes is not None
    return filled(
        HERE / "page.html.j2", now,
        name=name(facts.path, spec),
        path=str(facts.path.resolve()),
        model=_model(facts),
        summary=summary,
        numbers=key_numbers(facts),
        curves=curves.curves(facts.metrics, facts.evaluations, facts.program is not None),
        program=facts.program.program if facts.program else None,
        grid=grid.grid(placement, _newest(facts), axes=None if has_axes else ()) if placement else None,
        gantt=gantt.gantt(facts.traces, placement, spec) if placement and spec else None,
        profiles=[path.relative_to(facts.path) for path in RunDirectory(facts.path).profile.found()],
        memory=memory.memory(facts.traces, placement, spec, facts.plan.chunks if facts.plan else ()),
        ranks=_ranks(placement, _newest(facts)) if placement else (),
        groups=_groups(placement) if placement and has_axes else (),
        attempts=attempts(facts, summary.state),
        job_text=_job_text(facts),
        unreadable=facts.problems,
        size={"curves": curves, "gantt": gantt, "memory": memory},
    )


def _job_text(facts: RunFacts) -> str:
    if facts.spec is not None:
        return dump_job(without_secrets(facts.spec))
    if facts.program is None:
        return ""
    own = facts.program.program
    hidden = own.model_copy(update={"environment": dict.fromkeys(own.environment, HIDDEN)})
    return dump_job(without_secrets(facts.program).model_copy(update={"program": hidden}))


def without_secrets(spec: Spec) -> Spec:
    """Return the job without the values of its variables: they may be passwords, and pages are passed around."""
    hidden = spec.environment.model_copy(update={"set": dict.fromkeys(spec.environment.set, HIDDEN)})
    return spec.model_copy(update={"environment": hidden})


def _newest(facts: RunFacts) -> dict[int, RankStart]:
    return {start.rank: start for start in facts.starts if start.attempt == facts.attempt}


def _model(facts: RunFacts) -> str:
    if facts.program is not None:
        return shlex.join(facts.program.program.command)
    if facts.spec is None:
        return ""
    model = facts.spec.model
    return str(model.config["model_type"]) if model.config is not None else Path(model.pretrained or "").name


def _ranks(placement: Placement, starts: dict[int, RankStart]) -> list[tuple[int, str, str, tuple[int, ...]]]:
    """Return rank, node and host (if known), and local rank and coordinates."""
    return [(at.rank, starts[at.rank].node if at.rank in starts else str(at.node),
             starts[at.rank].host if at.rank in starts else "", (at.local_rank, at.dp, at.pp, at.cp, at.tp))
            for at in placement.ranks]


def _groups(placement: Placement) -> list[tuple[str, int, int, int, int, str]]:
    """Return kind, number of groups, ranks in each, nodes spanned, inter-node hops, and the members of all."""
    reach = reach_of(placement)
    return [(kind, len(groups), len(groups[0]), reach[kind].nodes, reach[kind].hops,
             " | ".join(" ".join(map(str, group)) for group in groups)) for kind, groups in placement.groups.items()]
