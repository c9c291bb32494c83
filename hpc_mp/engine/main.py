"""Entry of a rank: meet the others, build this rank's stage, train, and say how it ended."""

from __future__ import annotations

import faulthandler
import json
import os
import sys
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

from hpc_mp.data import Samples, TokenSet, find_files, load_tokens, prepare
from hpc_mp.engine import checkpoint, initial
from hpc_mp.engine.dropout import DropoutClock
from hpc_mp.engine.groups import FILES_TIMEOUT, Groups, build, choose_device, meet
from hpc_mp.engine.identity import Identity, identity
from hpc_mp.engine.logs import Log, record_failure
from hpc_mp.engine.loop import Trainer, write_trace
from hpc_mp.engine.memory import held_bytes, limit_bytes, peak_bytes
from hpc_mp.engine.optimizer import Optimizer
from hpc_mp.engine.pipeline import Pipeline, Span
from hpc_mp.engine.precision import PRECISIONS
from hpc_mp.engine.signals import EXIT_STOPPED, StopFlag
from hpc_mp.engine.stage import Part, Stage, hugging_face_config
from hpc_mp.engine.tensor import TensorGroup
from hpc_mp.engine.zero import shard
from hpc_mp.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job, load_job
from hpc_mp.models import ModelShape, check_layout, family_of, layer_costs, read_config, read_shape
from hpc_mp.placement import Degrees, Placement, from_dict, place, to_dict
from hpc_mp.rundir import (
    LineFile,
    RunDirectory,
    create_run,
    cut_metrics,
    find_run,
    newest_complete,
    read_json,
    write_json,
)
from hpc_mp.schedule import build as build_schedule
from hpc_mp.schedule import validate
from hpc_mp.schedule.stages import stage_layers


def main(job_file: Path) -> int:
    """Train one rank; returns its exit code (0 done, 1 failed, 2 wrong input, 75 stopped after saving)."""
    stop = StopFlag()
    faulthandler.enable()  # a segmentation fault leaves a stack trace in the rank's log
    os.umask(0o077)  # checkpoints, traces and tokens are the user's own, as the run directory is
    who = identity()
    try:
        torch.set_num_threads(_threads())
        spec = load_job(job_file)
        shape = read_shape(spec)
        check_layout(shape, spec)
        if who.world != spec.ranks:
            raise HpcMpError(f"{who.world} ranks ({who.source})", f"the job file asks for {spec.ranks} = "
                             f"nodes({spec.job.nodes}) × ranks_per_node({spec.job.ranks_per_node})",
                             "start that many ranks, or change job.nodes and job.ranks_per_node")
        device, backend = choose_device(spec.job.device, who, spec.job.ranks_per_node)
    except HpcMpError as error:
        launched = _launched(job_file)
        if launched is None:
            raise
        print(f"hpc-mp: {error}", file=sys.stderr)
        record_failure(launched, launched.attempt(), who, Log(launched, who), error)
        return 2
    store = meet(who, backend)
    run = _run_directory(job_file, spec, who, store)
    log = Log(run, who)
    log.capture()
    attempt = run.attempt()
    try:
        outcome = _train(spec, shape, run, attempt, who, device, backend, store, log, stop)
    except Exception as error:  # every end of a rank is recorded, whatever its cause
        return 2 if record_failure(run, attempt, who, log, error) == "user" else 1
    log.flush()
    return {"done": 0, "stopped": EXIT_STOPPED}[outcome]


def _threads() -> int:
    """Threads of this rank's matrix products, as OpenMP's variable says. Raises HpcMpError."""
    given = os.environ.get("OMP_NUM_THREADS", "1")
    if not given.isdigit() or int(given) == 0:
        raise HpcMpError(f"OMP_NUM_THREADS = {given!r}", "must be a whole number of at least 1",
                         "mend it in the environment or in environment.set")
    return int(given)


def leave() -> None:
    """Take leave of the others; gloo with sub-groups aborts at interpreter exit, so the caller ends with ``os._exit``."""
    dist.barrier()
    dist.destroy_process_group()


def _launched(job_file: Path) -> RunDirectory | None:
    """The run directory in which the job file lies, when a launcher has put it there."""
    beside = RunDirectory(job_file.resolve().parent)
    return beside if beside.placement.exists() else None


def _run_directory(job_file: Path, spec: JobSpec, who: Identity, store: dist.Store) -> RunDirectory:
    """The launched run, or for ranks started by hand a new one that rank 0 makes."""
    launched = _launched(job_file)
    if launched is not None:
        return launched
    key = "run directory"
    if who.rank == 0:
        run = create_run(Path(spec.job.directory), spec.job.name)
        degrees = Degrees(spec.parallel.tensor, spec.parallel.pipeline, spec.data_degree)
        order = "cluster" if spec.parallel.order == "auto" else spec.parallel.order
        run.job.write_text(dump_job(spec), encoding="utf-8")
        write_json(run.placement, to_dict(place(degrees, order, spec.job.ranks_per_node)))
        store.set(key, str(run.path))
    return RunDirectory(Path(store.get(key).decode()))


def _train(
    spec: JobSpec, shape: ModelShape, run: RunDirectory, attempt: int, who: Identity, device: torch.device, backend: str,
    store: dist.Store, log: Log, stop: StopFlag,
) -> str:
    """Everything between meeting the others and leaving them; returns "done" or "stopped"."""
    placement = from_dict(read_json(run.placement))
    _check_place(placement, who)
    _announce(run, attempt, placement, who)
    tokens = _tokens(spec, shape, run, attempt, who, store)
    _status(run, attempt, who, "building model")
    groups = build(placement, spec.shard_degree, device, backend, shape.tied)
    trainer = _assemble(spec, shape, run, attempt, groups, tokens, device, log, stop)
    counters = _restore(spec, shape, run, who, trainer.stage, trainer.optimizer, tokens, log)
    if who.rank == 0:
        cut_metrics(run.metrics, counters["step"])
    dist.barrier()  # some read their state longer than others: wait here, where the timeout is long

    def traced(step: int, spans: list[Span]) -> None:
        memory = held_bytes(trainer.optimizer) | {"peak": peak_bytes(device),
                                                  "limit": limit_bytes(device, spec.job.ranks_per_node)}
        write_trace(run.trace(who.rank), {"attempt": attempt, "rank": who.rank, "pp": placement.ranks[who.rank].pp,
                                          "step": step, "actions": spans, "memory": memory})

    _status(run, attempt, who, "training")
    log.say(f"training from step {counters['step'] + 1} to {spec.train.steps} on {device}, {backend}")
    outcome = trainer.train(counters, traced)
    _status(run, attempt, who, outcome)
    log.say(f"{outcome} after step {spec.train.steps}" if outcome == "done" else outcome)
    leave()
    return outcome


def _assemble(
    spec: JobSpec, shape: ModelShape, run: RunDirectory, attempt: int, groups: Groups, tokens: TokenSet,
    device: torch.device, log: Log, stop: StopFlag,
) -> Trainer:
    """This rank's stage, its part of the data axis, its optimizer and its pipeline; parameters have no values yet."""
    family, precision = family_of(shape.model_type), PRECISIONS[spec.train.precision]
    number, stages = groups.mesh["pp"].get_local_rank(), spec.parallel.pipeline
    costs = layer_costs(shape, spec.data.sequence_length)
    layers = stage_layers(spec.parallel.partition, costs.blocks, stages, costs.embedding, costs.head)
    begin = sum(layers[:number])
    part = Part(range(begin, begin + layers[number]), number == 0, number == stages - 1)
    clock = DropoutClock(spec.train.seed)
    config = hugging_face_config(read_config(spec), family, spec.train.dropout)

    stage = Stage(config, family, shape, part, TensorGroup(groups.mesh["tp"]), precision.master, clock)
    data = shard(stage, groups.mesh, spec.parallel.zero, precision)
    stage.to_empty(device=device)
    data.settle()
    optimizer = Optimizer(stage, spec.train, first_replica=groups.mesh["replicate"].get_local_rank() == 0)

    schedule = build_schedule(spec.parallel.schedule, stages, spec.microbatches,
                              reduce="each" if spec.parallel.zero >= 2 else "last")
    validate(schedule, stages, spec.microbatches)
    pipeline = Pipeline(stage, data, schedule[number], groups.neighbours,
                        (spec.microbatch_size, spec.data.sequence_length, shape.hidden), precision.compute, device)
    samples = Samples(tokens, spec.data.sequence_length, spec.train.seed)
    return Trainer(spec, run, attempt, stage, pipeline, optimizer, groups, clock, samples, device, log, stop)


def _restore(
    spec: JobSpec, shape: ModelShape, run: RunDirectory, who: Identity, stage: Stage, optimizer: Optimizer,
    tokens: TokenSet, log: Log,
) -> dict[str, Any]:
    """State from the run's newest complete checkpoint, else from ``checkpoint.resume``, else first values.

    Returns the counters: steps and tokens done, and the name of the token set, which stands for the text's content.
    """
    found: list[str | None] = [None]
    if who.rank == 0:
        path, skipped = newest_complete(run.checkpoints)
        for bad, reason in skipped:
            log.say(f"checkpoint {bad.name} is skipped: {reason}")
        if path is None and spec.checkpoint.resume is not None:
            other = find_run(Path(spec.checkpoint.resume))
            path, skipped = newest_complete(other.checkpoints)
            if path is None:
                raise HpcMpError(f"checkpoint.resume = {other.path}", "holds no complete checkpoint", "name another run")
        found = [str(path) if path else None]
    dist.broadcast_object_list(found)
    if found[0] is not None:
        log.say(f"going on from {found[0]}")
        path = Path(found[0])
        counters = checkpoint.load(path, stage, optimizer)
        if path.parent == run.checkpoints and counters["data"] != tokens.directory.name:
            raise HpcMpError(f"data.files ({', '.join(spec.data.files)})",
                             f"are not what this run has trained on: their text or its tokenizer has changed since {path.name}",
                             "bring the old text back, or start a new run with checkpoint.resume")
        return counters | {"data": tokens.directory.name}
    family = family_of(shape.model_type)
    if spec.model.pretrained is not None:
        source = initial.read(Path(spec.model.pretrained), family.checkpoint_prefixes)
    else:
        source = initial.drawn(spec.train.seed, shape.layers, shape.initializer_range, stage.padding)
    initial.fill(stage, source)
    return {"step": 0, "tokens": 0, "data": tokens.directory.name}


def _tokens(spec: JobSpec, shape: ModelShape, run: RunDirectory, attempt: int, who: Identity, store: dist.Store) -> TokenSet:
    """Rank 0 tokenizes (or finds it done), the others wait for it; they all read the same files."""
    key = "token set"
    if who.rank == 0:
        last = [0.0]

        def progress(done: int, total: int) -> None:
            if time.monotonic() - last[0] > 0.5:
                last[0] = time.monotonic()
                _status(run, attempt, who, "preparing data", done, total)

        _status(run, attempt, who, "preparing data")
        tokens = prepare(
            find_files(spec.data.files), vocabulary=shape.vocabulary, cache=run.cache, progress=progress,
            tokenizer_directory=Path(spec.data.tokenizer) if spec.data.tokenizer else None,
            pretrained=Path(spec.model.pretrained) if spec.model.pretrained else None,
        )
        (run.path / "tokenizer.path").write_text(str(tokens.tokenizer_directory), encoding="utf-8")
        store.set(key, str(tokens.directory))
        return tokens
    store.wait([key], FILES_TIMEOUT)
    return load_tokens(Path(store.get(key).decode()))


def _check_place(placement: Placement, who: Identity) -> None:
    """Every rank must run where the placement says (node and local rank)."""
    place_ = placement.ranks[who.rank]
    if place_.local_rank != who.local_rank:
        raise RuntimeError(f"rank {who.rank} is local rank {who.local_rank} on {who.node}, placement.json says "
                           f"{place_.local_rank} on node {place_.node}")


def _announce(run: RunDirectory, attempt: int, placement: Placement, who: Identity) -> None:
    place_ = placement.ranks[who.rank]
    file = LineFile(run.ranks)
    file.write(json.dumps({
        "attempt": attempt, "rank": who.rank, "node": who.node, "host": os.uname().nodename, "pid": os.getpid(),
        "local_rank": who.local_rank, "dp": place_.dp, "pp": place_.pp, "cp": place_.cp, "tp": place_.tp, "time": time.time(),
    }))
    file.close()


def _status(run: RunDirectory, attempt: int, who: Identity, phase: str, done: int = 0, total: int = 0) -> None:
    """What rank 0 is doing, for whoever watches."""
    if who.rank == 0:
        with suppress(OSError):  # a full disk must not stop training
            write_json(run.path / "status.json", {"attempt": attempt, "phase": phase, "detail": "", "done": done,
                                                  "total": total, "time": time.time()})
