"""The engine in forked ranks without a rendezvous, a run directory or a checkpoint: steps, and what ranks hold after them."""

import json
import math
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from itertools import count
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from layouts import DEVICE, RankState, Result, unfilled
from numpy.typing import NDArray
from ranks import Crew, run_ranks

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of, read_shape
from hpc_mp.layout.flat import Box
from hpc_mp.layout.models import kv_copies
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.data import (
    HeldOut,
    SampleRows,
    Samples,
    TokenSet,
    held_out_samples,
    load_tokens,
    positions,
    prepare_held_out,
    prepare_job,
    training_samples,
)
from hpc_mp.train.parallel import gloo
from hpc_mp.train.parallel.communicators import build, everyone
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank import evaluation, facts
from hpc_mp.train.rank.assemble import assemble
from hpc_mp.train.rank.bootstrap import lay_out
from hpc_mp.train.rank.devices import Seat, device_choice, own_gpu, seat_of, taken
from hpc_mp.train.rank.first_values import first_values
from hpc_mp.train.rank.proof import SignedKeys
from hpc_mp.train.rank.rendezvous import DEFAULT, rendezvous
from hpc_mp.train.rank.trainer import TRACED_STEP, evaluation_is_due, share
from hpc_mp.train.step.agreement import StepNumbers
from hpc_mp.train.step.engine import Engine, StepResult
from hpc_mp.train.step.memory import state_bytes

TIMEOUT = 600.0
MOST = 8 if DEVICE == "cuda" else 16  # idle ranks of all crews; each on a GPU has a context there


@dataclass(frozen=True)
class Report:
    """The result of one rank: numbers of every step, evaluations, its parts of the final parameters, and what its traced
    step held."""

    steps: Sequence[StepNumbers]
    evaluations: Sequence[tuple[int, float, int]]
    parts: Sequence[tuple[str, Box, NDArray[Any]]]
    memory: Mapping[str, int]
    chunks: int


class Crews:
    """Ranks that train one job after another: a crew for each number of ranks. Beyond ``MOST`` ranks the crew that has been idle
    longest ends."""

    def __init__(self) -> None:
        self._crews: dict[int, Crew] = {}  # the one used last is last
        self._numbers = count()

    def call(self, world: int, function: Callable[..., Any], *args: Any) -> list[Any]:
        """Call a function on so many ranks, and return the results by rank. Raises RuntimeError as ``Crew.call``."""
        crew = self._crews.pop(world, None) or self._new(world)
        answers = crew.call(function, *args, timeout=TIMEOUT)
        self._crews[world] = crew
        return answers

    def train(self, spec: JobSpec) -> Result:
        return gathered(spec, self.call(spec.ranks, rank_of, spec, next(self._numbers)))

    def end(self) -> None:
        while self._crews:
            self._crews.popitem()[1].end()

    def _new(self, world: int) -> Crew:
        while self._crews and sum(self._crews) + world > MOST:
            self._crews.pop(next(iter(self._crews))).end()
        return Crew(world)


def run_engine(spec: JobSpec, before: Callable[[], None] = lambda: None) -> Result:
    """Train on new ranks; ``before`` is called in each of them first, to break something on purpose."""

    def rank() -> Report:
        before()
        return rank_of(spec, 0)

    return gathered(spec, run_ranks(spec.ranks, rank, timeout=TIMEOUT))


def rank_of(spec: JobSpec, number: int) -> Report:
    """Train one rank of a job. ``number``: of the job, among all of a crew."""
    torch.set_num_threads(1)
    who, shape = identity(os.environ), read_shape(spec)
    layout = layout_of(spec, shape)
    schedule = schedule_of(layout)
    store = dist.PrefixStore(f"job {number}", _store())
    gpu, keys = own_gpu(spec.job.device, who), SignedKeys(dist.PrefixStore("seats", store), "")
    keys.set(f"{who.rank}", seat_of(who, gpu).gpu)
    seats = [Seat(who.node, keys.get(f"{rank}")) for rank in range(who.world)]
    device, backend = taken(gpu, device_choice(spec.job.device, seats, True))
    gloo.register()
    dist.init_process_group(DEFAULT[backend], store=store, rank=who.rank, world_size=who.world)
    host = everyone()
    groups = build(lay_out(spec), layout.shard_degree, device, backend, schedule, None, host,
                   kv_copies(shape, layout.degrees.tensor), expert_shards=layout.expert_cut().shards)
    engine = assemble(spec, shape, layout, groups, schedule, device)
    engine.start(first_values(spec, shape))
    training, *held_out = _tokens(spec, shape.vocabulary, who.rank, store)
    samples = training_samples(spec, shape, training)
    rows = [held_out_samples(spec, shape, tokens) for tokens in held_out]
    steps: list[StepNumbers] = []
    evaluations: list[tuple[int, float, int]] = []
    for step in range(spec.train.steps):
        traced = step + 1 == min(TRACED_STEP, spec.train.steps)
        result = _step(spec, engine, samples, step, traced)
        steps.append(result.numbers())
        if traced:
            memory = state_bytes(engine.data.units.values(), engine.optimizer) | {
                "activations": result.passed.most_here, "away": result.passed.most_away}
            chunks = result.passed.most_held
        if evaluation_is_due(spec, step + 1):
            evaluations.append((step + 1, *_evaluate(spec, engine, rows[0], step + 1)))
    parts = [(held.key, held.box, held.values.cpu().numpy().copy()) for held in engine.held()
             if not held.key.startswith("optimizer.")]
    _leave(host)
    return Report(steps, evaluations, parts, memory, chunks)


@cache
def _store() -> dist.Store:
    """Return the store in which the ranks of this crew meet."""
    who, where = identity(os.environ), rendezvous(None)
    if who.world == 1:
        return dist.HashStore()
    first = who.rank == 0
    return dist.TCPStore(where.address, where.port, who.world, is_master=first, wait_for_workers=False,
                         master_listen_fd=where.listener if first else None)


def _leave(host: Tree) -> None:
    """Close the connections of all groups, once no rank needs them."""
    facts.barrier(host)
    dist.destroy_process_group()


def _tokens(spec: JobSpec, vocabulary: int, rank: int, store: dist.Store) -> list[TokenSet]:
    """Return the tokens to train on, and the held-out ones if the job evaluates. The first rank prepares them."""
    if rank == 0:
        directory = Path(spec.job.directory) / ".cache"
        training = prepare_job(spec, vocabulary, directory, quiet)
        held_out = prepare_held_out(spec, vocabulary, directory, quiet, training)
        store.set("tokens", json.dumps([str(tokens.directory) for tokens in (training, held_out) if tokens is not None]))
    return [load_tokens(Path(name)) for name in json.loads(store.get("tokens"))]


def quiet(done: int, total: int) -> None:
    """Show no progress of the tokenization."""


def _step(spec: JobSpec, engine: Engine, samples: Samples, step: int, traced: bool) -> StepResult:
    own = positions(step * spec.train.global_batch, global_batch=spec.train.global_batch, data_degree=spec.data_degree,
                    data_rank=engine.groups.data_rank, microbatches=spec.microbatches)
    return engine.step(step, share(spec, samples, own, step, sum(map(samples.label_count, own)), engine), trace=traced)


def _evaluate(spec: JobSpec, engine: Engine, rows: HeldOut | SampleRows, step: int) -> tuple[float, int]:
    passes = evaluation.passes(len(rows), microbatch=spec.microbatch_size, microbatches=spec.microbatches,
                               data_degree=spec.data_degree, data_rank=engine.groups.data_rank)
    parts = [engine.evaluate(share(spec, rows, own, step, 0, engine)) for own in passes]
    labels = sum(part.labels for part in parts)
    return sum(part.loss for part in parts) / labels, labels


def gathered(spec: JobSpec, reports: Sequence[Report]) -> Result:
    """Return the result that all ranks report together."""
    whole, apart = unfilled(spec), 0.0
    for name, box, values in (part for report in reports for part in report.parts):
        known, own = whole[name][box], torch.from_numpy(values).double()
        differences = (known - own)[~known.isnan()].abs()  # a number is NaN before a rank has reported it
        apart = max([apart, *differences.tolist()]) if own.isfinite().all() else math.inf
        whole[name][box] = own
    first = reports[0]
    assert all(report.evaluations == first.evaluations for report in reports)
    losses, norms, dropped = (tuple(number if math.isfinite(number) else None for number in numbers) for numbers in (
        (step.loss for step in first.steps), (step.norm for step in first.steps), (step.dropped for step in first.steps)))
    states = tuple(RankState(place, report.memory, report.chunks, frozenset(str(values.dtype) for _, _, values in report.parts))
                   for place, report in zip(lay_out(spec).ranks, reports, strict=True))
    return Result(losses, norms, whole, dropped, tuple(step.router_loss for step in first.steps), tuple(first.evaluations),
                  apart, states)
