"""The plan of a program in words, printed before the start."""

import shlex

from hpc_mp.base.text import counted
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.summary import reasons, remarks, table, where_row
from hpc_mp.layout.placement import normalize_order, reach_of

STARTED = {
    "rank": "",
    "node": ", once for every node, where it starts its ranks itself",
    "mpi": ", once for every rank, which meet through MPI",
    "script": ", a job script, once on the first node, where it starts its ranks itself",
}


def describe_program(plan: ProgramPlan, title: str) -> str:
    """Return where it runs and why, and the command of every rank. ``title``: description of where the back end's ranks run."""
    program, limit = plan.spec.program, plan.spec.program.silent_limit
    rows = {
        "where": where_row(plan, title),
        "device": f"{plan.device.kind} ({plan.device.why})",
        "program": f"{shlex.join(program.command)}, in {program.directory}{STARTED[program.start]}",
        **_axes(plan),
        "hang": f"when no rank has printed a line for {limit} s (program.silent_limit)" if limit else
                "never noticed (program.silent_limit = 0)",
    }
    rows |= reasons(nodes=plan.resolution.exclude, profile=plan.resolution.profile, mpi=plan.resolution.mpi)
    return table(rows | remarks(plan))


def _axes(plan: ProgramPlan) -> dict[str, str]:
    axes, p, placement = plan.spec.program.axes, plan.spec.parallel, plan.placement
    if axes is None:
        return {}
    d = placement.degrees
    sizes = {"tp": ("tensor", d.tensor), "pp": ("pipeline", d.pipeline), "cp": ("context", d.context), "dp": ("data", d.data)}
    reach = reach_of(placement)
    spans = ", ".join(f"{sizes[name][0]} groups span {counted(reach[name].nodes, 'node')}" for name in sizes
                      if sizes[name][1] > 1)
    layout = " × ".join(f"{name}({size})" for name, size in sizes.values() if size > 1) or "data(1)"
    location = ("on the nodes of parallel.rank_map" + ("" if p.order == "auto" else ", which goes before parallel.order")
                if isinstance(p.rank_map, tuple) else "as it numbers its ranks" if p.order == "auto"
                else f"laid out in the order {normalize_order(p.order, d.context)}")
    return {"layout": layout, "order": f"{placement.order} ({axes}), {location}" + (f"; {spans}" if spans else "")}
