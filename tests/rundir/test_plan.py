"""``plan.json``: written and read back, and the only place that the supervisor asks."""

from __future__ import annotations

from pathlib import Path

import grimp
import pytest

from hpc_mp.job.resolution import ResolvedKey
from hpc_mp.rundir import create_run, prepare_resume
from hpc_mp.rundir.plan import ChunkCounts, RunPlan, StateBytes, Traffic, read_plan, write_plan

PLAN = RunPlan((3, 2), Traffic(1.5, 2.0, 3.0, 4.0, 5.0, shards=2), (StateBytes(1, 2, 3),) * 4, 0.25,
               (ResolvedKey("parallel.order", "DPT", "one node"),), (ChunkCounts(4, 3, 2), ChunkCounts(1, 1, 0)), "slurm")


def test_a_plan_is_read_as_it_was_written(tmp_path: Path) -> None:
    run = create_run(tmp_path, "a")
    assert read_plan(run) is None
    write_plan(run, PLAN)
    assert read_plan(run) == PLAN
    assert PLAN.traffic.total == 15.5 and PLAN.traffic.data == 7.0 and PLAN.state[0].total == 6


@pytest.mark.parametrize("text", ["", "{}", "[]", '{"layers": 3}', "null"])
def test_a_broken_plan_is_none(tmp_path: Path, text: str) -> None:
    run = create_run(tmp_path, "a")
    run.plan.write_text(text)
    assert read_plan(run) is None


def test_a_resume_puts_it_away(tmp_path: Path) -> None:
    run = create_run(tmp_path, "a")
    write_plan(run, PLAN)
    prepare_resume(run)
    assert read_plan(run.of_attempt(1)) == PLAN


def test_the_supervisor_derives_no_layers() -> None:
    """It reads the plan: by no way of imports does it reach what reads a model or cuts it into stages."""
    graph = grimp.build_graph("hpc_mp", cache_dir=None)

    def reached(module: str) -> list[str]:
        return [target for target in ("hpc_mp.layout.models.shape", "hpc_mp.layout.schedule.partition", "hpc_mp.planner.traffic",
                                      "hpc_mp.planner.memory")
                if graph.find_shortest_chain(module, target) is not None]

    assert reached("hpc_mp.supervisor.prepare") == []
    assert "hpc_mp.layout.schedule.partition" in reached("hpc_mp.launch.plan"), "the control: who plans does"
