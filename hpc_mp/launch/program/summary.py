"""The plan of a program in words, printed before the start."""

from __future__ import annotations

import shlex

from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.summary import table, where_row, without_effect

STARTED = {
    "rank": "",
    "node": ", once for every node, where it starts its ranks itself",
    "mpi": ", once for every rank, which meet through MPI",
}


def describe_program(plan: ProgramPlan, title: str) -> str:
    """Where it runs and why, and what every rank starts.

    Args:
        title: of the back end: where its ranks run.
    """
    program, limit = plan.spec.program, plan.spec.program.silent_limit
    rows = {
        "where": where_row(plan, title),
        "device": f"{plan.device.kind} ({plan.device.why})",
        "program": f"{shlex.join(program.command)}, in {program.directory}{STARTED[program.start]}",
        "hang": f"when no rank has printed a line for {limit} s (program.silent_limit)" if limit else
                "never noticed (program.silent_limit = 0)",
    }
    for name, choice in (("nodes", plan.resolution.exclude), ("profile", plan.resolution.profile), ("mpi", plan.resolution.mpi)):
        if choice.why:
            rows[name] = choice.why
    if (note := without_effect(plan.given, plan.where.place)) is not None:
        rows["note"] = note
    return table(rows)
