"""The page: facts in, one self-contained HTML file out."""

from __future__ import annotations

import base64
import hashlib
import os
import time
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

from hpc_mp import __version__
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import moment, percent
from hpc_mp.job import JobSpec, dump_job
from hpc_mp.layout.placement import Placement, reach_of
from hpc_mp.report import curves, gantt, grid, memory
from hpc_mp.report.facts import RunFacts, read_facts
from hpc_mp.report.summary import attempts, key_numbers, name, summarize
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.records import RankStart

HERE = Path(__file__).resolve().parent
PRIVATE = 0o600  # logs and job files are the user's own
HIDDEN = "(hidden)"


def write_report(run: RunDirectory) -> Path:
    """Write ``report.html`` (mode 600) from whatever lies in the run directory; a page that is there is replaced whole.

    Raises:
        HpcMpError: the page cannot be written.
    """
    text = render(read_facts(run), time.time())
    temporary = run.path / f".{run.report.name}.{os.getpid()}"
    try:
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, PRIVATE), "w", encoding="utf-8") as file:
            file.write(text)
        os.replace(temporary, run.report)
    except OSError as error:
        temporary.unlink(missing_ok=True)
        raise HpcMpError(f"report {run.report}", f"cannot be written ({error.strerror})",
                         "make room there, or copy the run to where you may write and report the copy") from None
    return run.report


def render(facts: RunFacts, now: float) -> str:
    """The page as of ``now`` (unix seconds). Everything that comes from the run is escaped."""
    summary = summarize(facts)
    script = (HERE / "page.js").read_text(encoding="utf-8")
    placement, spec = facts.placement, facts.spec
    environment = Environment(loader=FileSystemLoader(HERE), autoescape=True, undefined=StrictUndefined,
                              trim_blocks=True, lstrip_blocks=True)
    environment.filters["percent"] = percent
    return environment.get_template("page.html.j2").render(
        name=name(facts.path, spec),
        path=str(facts.path.resolve()),
        model=_model(facts),
        summary=summary,
        numbers=key_numbers(facts),
        curves=curves.curves(facts.metrics, facts.evaluations),
        grid=grid.grid(placement, _newest(facts)) if placement else None,
        gantt=gantt.gantt(facts.traces, placement, spec) if placement and spec else None,
        memory=memory.memory(facts.traces, placement, spec, facts.plan.chunks if facts.plan else ()),
        ranks=_ranks(placement, _newest(facts)) if placement else (),
        groups=_groups(placement) if placement else (),
        attempts=attempts(facts, summary.state),
        job_text=dump_job(_without_secrets(spec)) if spec else "",
        unreadable=facts.problems,
        now=moment(now),
        version=__version__,
        size={"curves": curves, "gantt": gantt, "memory": memory},
        style=(HERE / "page.css").read_text(encoding="utf-8"),
        script=script,
        script_hash=base64.b64encode(hashlib.sha256(script.encode()).digest()).decode(),
    )


def _without_secrets(spec: JobSpec) -> JobSpec:
    """Variables may be passwords, and pages are passed around: their values are left out."""
    hidden = spec.environment.model_copy(update={"set": dict.fromkeys(spec.environment.set, HIDDEN)})
    return spec.model_copy(update={"environment": hidden})


def _newest(facts: RunFacts) -> dict[int, RankStart]:
    """Rank → its newest start in the current attempt."""
    return {start.rank: start for start in facts.starts if start.attempt == facts.attempt}


def _model(facts: RunFacts) -> str:
    if facts.spec is None:
        return ""
    model = facts.spec.model
    return str(model.config["model_type"]) if model.config is not None else Path(model.pretrained or "").name


def _ranks(placement: Placement, starts: dict[int, RankStart]) -> list[tuple[int, str, str, tuple[int, ...]]]:
    """Rank, node and host as far as they are known, and local rank and coordinates."""
    return [(at.rank, starts[at.rank].node if at.rank in starts else str(at.node),
             starts[at.rank].host if at.rank in starts else "", (at.local_rank, at.dp, at.pp, at.cp, at.tp))
            for at in placement.ranks]


def _groups(placement: Placement) -> list[tuple[str, int, int, int, int, str]]:
    """Kind, number of groups, ranks in each, nodes spanned, inter-node hops, and the members of all."""
    reach = reach_of(placement)
    return [(kind, len(groups), len(groups[0]), reach[kind].nodes, reach[kind].hops,
             " | ".join(" ".join(map(str, group)) for group in groups)) for kind, groups in placement.groups.items()]
