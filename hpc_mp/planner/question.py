"""The question of a search: a job, the keys of it that hold, the machine and the goal. Also, the questions to ask next."""

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from hpc_mp.job import JobSpec
from hpc_mp.job.parallel import MOST_MICROBATCHES
from hpc_mp.job.resolution import ResolvedKey, resolved
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.planner.footprint import Footprint, footprint
from hpc_mp.planner.frameworks import OURS, Framework, footprint_elsewhere
from hpc_mp.planner.machine import NodeType

KEYS = ("recompute", "shard_degree", "zero", "virtual_stages", "schedule", "sequence", "microbatches", "context_method",
        "expert", "context", "pipeline", "tensor", "order")  # of [parallel], the cheapest remedies first


@dataclass(frozen=True, slots=True)
class Question:
    """A job, its model's shape, the machine, the keys of ``[parallel]`` that hold, and the goal: speed, gpus or memory.
    ``framework``: what trains; ``allowed``: options of keys as words, if it has only these."""

    spec: JobSpec
    shape: ModelShape
    machine: NodeType
    stated: frozenset[str] = frozenset()
    goal: str = "speed"
    framework: Framework = OURS
    allowed: Mapping[str, Collection[str]] = field(default_factory=dict)

    def having(self, **values: Any) -> "Question":
        """Return the question for a job with other values, by dotted key."""
        return replace(self, spec=resolved(self.spec, map(ResolvedKey, values, values.values())))

    def options(self, key: str, options: Sequence[Any]) -> Sequence[Any]:
        """Return the stated value of a key, else those of the options that are allowed."""
        if key in self.stated:
            return (getattr(self.spec.parallel, key),)
        return [option for option in options if str(option).lower() in self.allowed.get(key, (str(option).lower(),))]

    def footprints(self, layout: Layout) -> tuple[Footprint, ...]:
        """Return the footprint of every rank of a pipeline under the framework."""
        ours = self.framework is OURS
        return footprint(layout, self.shape) if ours else footprint_elsewhere(layout, self.shape, self.framework)


def larger(question: Question) -> Iterator[Question]:
    """Yield the question on more and more nodes, by an eighth at most beyond 8; for the goal gpus, first on parts of one."""
    per_node = question.spec.job.ranks_per_node
    for ranks in divisors(per_node)[0 if question.goal == "gpus" else -1:]:
        yield question.having(**{"job.nodes": 1, "job.ranks_per_node": ranks})
    for nodes in sorted({*(2**power for power in range(1, 15)), *(int(1.125**power) for power in range(6, 83))}):
        yield question.having(**{"job.nodes": nodes})


def remedies(question: Question) -> Iterator[Question]:
    """Yield the question without one of the stated keys, without all, with the optimizer offloaded, and on more nodes."""
    yield from (replace(question, stated=question.stated - {key}) for key in KEYS if key in question.stated)
    free = replace(question, stated=frozenset())
    yield from (free, free.having(**{"parallel.offload": ("optimizer",)}), *larger(free))


def divisors(number: int) -> list[int]:
    """Return the divisors, up to the most microbatches of a job."""
    return [divisor for divisor in range(1, min(number, MOST_MICROBATCHES) + 1) if number % divisor == 0]
