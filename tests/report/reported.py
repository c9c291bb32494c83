"""Run directories as launcher and ranks write them."""

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

from html_page import Page

from hpc_mp.job import dump_job, resolve
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.layout.schedule import build, simulate
from hpc_mp.report.page import write_report
from hpc_mp.rundir import LineFile, create_run, cut_metrics, prepare_resume, write_json

BEGIN = 1_790_000_000.0
MIB = 2**20


class Run:
    """A run of ``nodes`` × ``per_node`` ranks; each method writes what launcher or ranks write at that point."""

    def __init__(self, directory: Path, *, nodes: int = 2, per_node: int = 4, tensor: int = 2, pipeline: int = 2,
                 microbatches: int = 4, steps: int = 20, schedule: str = "1f1b", virtual_stages: int = 1,
                 name: str = "demo",
                 environment: dict[str, str] | None = None) -> None:
        self.nodes, self.per_node = nodes, per_node
        data = nodes * per_node // (tensor * pipeline)
        self.spec = resolve({
            "job": {"name": name, "nodes": nodes, "ranks_per_node": per_node},
            "model": {"config": {"model_type": "gpt2"}},
            "data": {"files": ["*.txt"], "sequence_length": 64},
            "parallel": {"tensor": tensor, "pipeline": pipeline, "microbatches": microbatches, "schedule": schedule,
                         "virtual_stages": virtual_stages},
            "train": {"steps": steps, "global_batch": 2 * data * microbatches},
            "environment": {"set": environment or {}},
        }, directory)
        self.placement = place(Degrees(tensor, pipeline, data), "DPT", per_node)
        self.run = create_run(directory / "runs", name)
        self.run.job.write_text(dump_job(self.spec), encoding="utf-8")
        write_json(self.run.placement, to_dict(self.placement))
        self.attempt = 1

    @property
    def path(self) -> Path:
        return self.run.path

    def start(self, node: Callable[[int], str] = "node{}".format, host: str = "vm") -> None:
        self._lines(self.run.ranks, *({
            "attempt": self.attempt, "rank": at.rank, "node": node(at.node), "host": host, "pid": 100 + at.rank,
            "local_rank": at.local_rank, "dp": at.dp, "pp": at.pp, "cp": at.cp, "tp": at.tp,
            "time": BEGIN + self.attempt,
        } for at in self.placement.ranks))

    def status(self, phase: str, **more: int) -> None:
        document = {"attempt": self.attempt, "phase": phase, "detail": "", "done": 0, "total": 0, "time": BEGIN + 75}
        write_json(self.path / "status.json", document | more)

    def train(self, first: int, last: int, loss: Callable[[int], float] = lambda step: 6 - step / 10) -> None:
        self._lines(self.run.metrics, *({
            "step": step, "loss": loss(step), "tokens": 1024 * step, "step_time_s": 0.5 + step / 1000,
            "tokens_per_s": 1024 / (0.5 + step / 1000), "learning_rate": 3e-4, "grad_norm": 1 / step,
            "peak_memory_bytes": 300 * MIB + step, "attempt": self.attempt,
        } for step in range(first, last + 1)))

    def trace(self, limit: int = 400 * MIB, wait: float = 0.0, skip: tuple[int, ...] = ()) -> None:
        """The ideal schedule, forwards of 10 ms, backwards of 20 ms, their parts of 10; ranks but the first ``wait`` s late."""
        p = self.spec.parallel
        ideal = simulate(build(p.schedule, p.pipeline, self.spec.microbatches, p.virtual_stages),
                         {"F": 0.010, "B": 0.020, "I": 0.010, "W": 0.010})
        for at in self.placement.ranks:
            if at.rank in skip:
                continue
            late = BEGIN + (wait if at.pp else 0.0)
            first = late + ideal.ranks[at.pp][0].start
            actions: list[list[Any]] = [["RECV_F", at.pp, 0, BEGIN, first]] if at.pp else []
            actions += [[slot.action.kind, slot.action.stage, slot.action.microbatch, late + slot.start, late + slot.end]
                        for slot in ideal.ranks[at.pp]]
            end = late + ideal.makespan
            actions += [["REDUCE", at.pp, 0, end, end + 0.004], ["OPTIMIZER", 0, -1, end + 0.004, end + 0.012]]
            self.run.trace(at.rank).write_text(json.dumps({
                "attempt": self.attempt, "rank": at.rank, "pp": at.pp, "step": 2, "actions": actions,
                "memory": {"parameters": (30 + at.pp) * MIB, "optimizer": 60 * MIB, "peak": (200 + at.rank) * MIB,
                           "limit": limit},
            }), encoding="utf-8")

    def fail(self, rank: int, kind: str, message: str, after: float = 60.0, traceback: str = "Traceback …") -> None:
        write_json(self.run.failure(self.attempt, rank), {
            "attempt": self.attempt, "rank": rank, "node": "node1", "host": "vm", "pid": 1, "time": BEGIN + after,
            "kind": kind, "message": message, "traceback": traceback})

    def log(self, *lines: str) -> None:
        file = LineFile(self.run.main_log)
        for line in lines:
            file.write(f"08:30:00 {line}")
        file.close()

    def resume(self, step: int) -> None:
        self.attempt = prepare_resume(self.run)
        cut_metrics(self.run.metrics, step)

    def complete(self) -> "Run":
        self.start()
        self.train(1, self.spec.train.steps)
        self.trace()
        self.status("done")
        return self

    def page(self) -> Page:
        return Page(write_report(self.run).read_text(encoding="utf-8"))

    @staticmethod
    def _lines(path: Path, *records: dict[str, Any]) -> None:
        file = LineFile(path)
        for record in records:
            file.write(json.dumps(record))
        file.close()
