"""Entry point of a rank: meet the other ranks, build this rank's stage, train, and report how it ended."""

import faulthandler
import importlib
import os
import sys
import time
from collections.abc import Callable, Mapping
from contextlib import ExitStack, suppress
from dataclasses import asdict, replace
from datetime import timedelta
from functools import partial
from pathlib import Path

import torch
import torch.distributed as dist

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.extras import need_train
from hpc_mp.base.garbage import uncollected
from hpc_mp.job import JobSpec
from hpc_mp.job.layout import layout_of
from hpc_mp.job.spec import time_to_meet
from hpc_mp.layout.models import Family, ModelShape, family_of, kv_copies
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.rundir import LineFile, cut_metrics
from hpc_mp.rundir.expected import ENOUGH, observe
from hpc_mp.rundir.rank_env import check_place
from hpc_mp.rundir.records import RankMemory, RankStart, RankTrace, StepMetrics, TracedAction
from hpc_mp.rundir.usage import cut_steps
from hpc_mp.train.data import held_out_samples, training_samples
from hpc_mp.train.parallel.communicators import build, check_coordinates
from hpc_mp.train.parallel.groups import Tree
from hpc_mp.train.rank import bootstrap, facts
from hpc_mp.train.rank.devices import NCCL, agree_on_devices, check_devices, device_name
from hpc_mp.train.rank.evaluation import Evaluator, evaluations_made
from hpc_mp.train.rank.failures import LAST_FILES, NodeLost, PeerGone, RankContext, cause_known, die, limit_files, record_failure
from hpc_mp.train.rank.fencing import FencedOut, check_kept
from hpc_mp.train.rank.heartbeat import heartbeat
from hpc_mp.train.rank.heartbeat_server import GRACE_S
from hpc_mp.train.rank.logs import cap, capture_transformers
from hpc_mp.train.rank.proof import SignedKeys
from hpc_mp.train.rank.rendezvous import FILES_TIMEOUT, connect, meet
from hpc_mp.train.rank.saver import Saver
from hpc_mp.train.rank.signals import EXIT_STOPPED, REASONS, Pace, StopConditions, StopFlag, Stopped, ending_in
from hpc_mp.train.rank.token_sets import tokens_of
from hpc_mp.train.rank.trackers import tracked
from hpc_mp.train.rank.trainer import TRACED_EACH, Trainer, TrainingEnd, agree, write_trace
from hpc_mp.train.rank.utilization import peak_speed
from hpc_mp.train.rank.waits import noted
from hpc_mp.train.rank.watchdog import FIRST, Watchdog, limits
from hpc_mp.train.step.engine import StepResult
from hpc_mp.train.step.memory import limit_bytes, peak_bytes, resident_noted, state_bytes

# Interval at which a thread that waits for the interpreter lock asks for it. Python's 5 ms needlessly wake every watching thread
# of every rank if ranks outnumber cores. The main thread releases the lock in every operation of torch anyway.
SWITCH_S = 0.1
MEETING_S = 10.0  # time that a stop request leaves ranks to meet, and then to stop together
LINGER_S = 2 * GRACE_S  # time that a rank stays alive after it lost another, so that the heartbeat can name the node


def main(job_file: Path, stop: StopFlag | None = None) -> int:
    """Train one rank. Return its exit code (0 done, 1 failed, 2 wrong input, 75 stopped after saving). ``stop``: made by the
    caller so that no stop request is lost while this module is imported."""
    stop = stop or StopFlag()
    sys.setswitchinterval(SWITCH_S)
    faulthandler.enable()  # a segmentation fault leaves a stack trace in the rank's log
    limit_files(LAST_FILES)  # gloo connects every rank with many others, the store with all
    os.umask(0o077)  # checkpoints, traces and tokens are private to the user, like the run directory
    try:
        begun = bootstrap.start(job_file)
        with begun.waits.listening():
            return _run(job_file, begun, stop)
    except FencedOut as stale:
        print(f"hpc-mp: {stale}; it ends", file=sys.stderr, flush=True)
        return 1


def _run(job_file: Path, begun: bootstrap.Bootstrap, stop: StopFlag) -> int:
    who = begun.who
    try:
        torch.set_num_threads(bootstrap.threads())
        spec, shape = bootstrap.read_job(job_file, who)
    except HpcMpError as error:
        if begun.run is None or begun.placement is None or who.rank >= len(begun.placement.ranks):
            raise
        print(f"hpc-mp: {error}", file=sys.stderr)
        record_failure(begun.context(begun.run, begun.placement), error)
        return 2
    try:
        with ending_in(MEETING_S), Watchdog(limits(spec.job), partial(_unmet, begun), "come"):
            store, keys = begun.waits.together("the rendezvous", range(who.world), lambda: meet(
                who, begun.where, timedelta(seconds=time_to_meet(spec.job)) or FILES_TIMEOUT))
            device, backend = begun.waits.together("the choice of devices", range(who.world), lambda: agree_on_devices(
                spec.job.device, who, keys))
    except (RuntimeError, OSError, HpcMpError) as error:  # a rank did not come: its node may be lost
        if begun.run is None or begun.placement is None:
            raise
        return 2 if record_failure(begun.context(begun.run, begun.placement), error) == "user" else 1
    context = begun.waits.behind("the run directory", 0, lambda: bootstrap.join_run(begun, spec, shape, keys))
    context.log.capture()
    with ExitStack() as beating:
        beating.enter_context(noted(context.waits, context.run, context.attempt, spec.job.step_timeout))
        beating.enter_context(resident_noted(context.run.memory(who.rank)))
        try:
            beating.enter_context(heartbeat(context.placement, who.rank, begun.where, keys, spec.job.heartbeat_timeout,
                                            partial(_lost, context)))
            with Watchdog(limits(spec.job), partial(die, context)) as watchdog:
                with ending_in(MEETING_S):
                    host = begun.waits.together("the connections", range(who.world), lambda: connect(who, store, backend))
                context = replace(context, host=host)
                context.waits.devices = backend == NCCL
                check_place(context.placement, who, bootstrap.known_hosts(context.record))
                check_coordinates(context.placement, who.rank)
                nodes = _introduce(context, device_name(device))
                watchdog.now("start")
                ended = _train(spec, shape, context, nodes, device, backend, keys, stop, watchdog, beating)
                leave(host, backend)
        except FencedOut:
            raise
        except Exception as error:  # every end of a rank is recorded, whatever its cause
            kind = record_failure(context, error)
            if kind == "peer" and context.record is not None:
                time.sleep(LINGER_S)  # without the watchdog, which would call it hung
            return 2 if kind == "user" else 1
    context.log.flush()
    return EXIT_STOPPED if ended.stopped else 0


def _unmet(begun: bootstrap.Bootstrap, hung: Exception) -> None:
    """Handle a rendezvous that hangs. The watchdog calls it; rank 0's kernel may accept connections while its process hangs."""
    if begun.run is None or begun.placement is None:
        print(f"hpc-mp: {hung}", file=sys.stderr, flush=True)
        os._exit(1)
    die(begun.context(begun.run, begun.placement), hung)


def leave(host: Tree, backend: str) -> None:
    """Leave the process group. gloo with sub-groups aborts at interpreter exit, so the caller ends with ``os._exit``. This
    closes its connections too, without waiting for the thread of each one."""
    facts.barrier(host)
    if backend != "gloo":
        dist.destroy_process_group()


def _introduce(context: RankContext, device: str) -> dict[int, str]:
    """Exchange node and device with all ranks. Return the name of every node of the placement. Raises HpcMpError if the ranks'
    devices do not match."""
    starts = [RankStart(**fields) for fields in facts.on_first(asdict(bootstrap.rank_start(context, device)), context.everyone)]
    places: set[tuple[int, str, str]] = set()
    if starts:
        bootstrap.announce(context.run, starts)
        places = {(place.node, entry.node, entry.device) for place, entry in zip(context.placement.ranks, starts, strict=True)}
    # All ranks read it, so it has a line per node, not per rank.
    seats: list[tuple[int, str, str]] = facts.broadcast(sorted(places), context.everyone)
    check_devices([(name, device) for _, name, device in seats])
    return {node: name for node, name, _ in seats}


def _train(spec: JobSpec, shape: ModelShape, context: RankContext, nodes: Mapping[int, str], device: torch.device, backend: str,
           store: SignedKeys, stop: StopFlag, watchdog: Watchdog, opened: ExitStack) -> TrainingEnd:
    """Run all of the training, from the meeting with the other ranks to the end. ``nodes``: the name of every node of the
    placement. ``opened``: closes at the end of the rank what stays open until then."""
    pace, record = Pace(), context.record
    conditions = StopConditions(stop, pace, context.run.stop, record.end if record else None, record.grace if record else 0.0)
    checks: list[Callable[[], None]] = [
        partial(check_kept, context.run), context.fence.check, conditions.check] if context.who.rank == 0 else []
    duties = list(checks)
    if context.who.local_rank == 0 and record is not None:  # srun writes a log per node
        duties.append(partial(cap, context.run.node_log(context.who.node)))

    def stop_reason() -> str | None:
        for check in checks:
            check()
        return REASONS.get(stop.reason)

    def stop_if_asked() -> None:
        stop_reason()
        reason = agree(stop, context.everyone)
        if reason is not None:
            raise Stopped(reason)

    import_model_code(family_of(shape))  # all ranks at once; those behind rank 0 would wait for its tokens anyway
    from hpc_mp.train.rank.assemble import assemble, check_precision, restore

    check_precision(spec.train.precision, device)
    try:
        tokens, held_out = tokens_of(spec, shape, context, store, stop_reason)
        bootstrap.status(context, "building model")
        layout = layout_of(spec, shape)
        schedule = schedule_of(layout)
        timeout = timedelta(seconds=FIRST * spec.job.step_timeout) if spec.job.step_timeout else None
        groups = context.waits.together("the making of process groups", range(context.who.world), lambda: build(
            context.placement, layout.shard_degree, device, backend, schedule, timeout, context.everyone,
            kv_copies(shape, layout.degrees.tensor), expert_shards=layout.expert_cut().shards))
        engine = assemble(spec, shape, layout, groups, schedule, device)
        stop_if_asked()
        watchdog.now("load")
        counters = restore(spec, shape, context, engine, groups, tokens)
        stop_if_asked()  # some ranks load their state longer than others: all wait here, where the timeout is long
    except Stopped as stopped:
        _conclude(context, str(stopped), "before the first step of this attempt")
        return TrainingEnd(0, str(stopped))
    if context.who.rank == 0:
        context.fence.confirm()
        cut_steps(context.run, counters.step)
        for file in (context.run.metrics, context.run.evaluations):
            cut_metrics(file, counters.step)
    track = opened.enter_context(tracked(spec, context, counters.step))
    samples = training_samples(spec, shape, tokens)
    evaluator = None if held_out is None else Evaluator(
        spec, context, engine, held_out_samples(spec, shape, held_out), device, stop, duties, watchdog,
        LineFile(context.run.evaluations), track, evaluations_made(context))
    evaluate, enough = ((lambda step, stop: None), lambda: False) if evaluator is None else (evaluator.after, evaluator.enough)
    saver = Saver(context, engine, spec.checkpoint.keep, spec.checkpoint.failures, spec.checkpoint.background, watchdog, pace,
                  lambda rank: nodes[context.placement.ranks[rank].node])

    def compared(kind: str, metrics: StepMetrics) -> None:
        track(kind, metrics)
        with suppress(OSError):  # of a file system: no reason to stop
            due = (metrics.step - counters.step) % TRACED_EACH == ENOUGH
            steps = observe(context.run, context.attempt) if due else None
            for line in () if steps is None else (steps.words, *(f"warning: {text}" for text in steps.warnings)):
                context.log.say(line)

    trainer = Trainer(spec, context.run, context.attempt, saver, engine, groups, samples, device, context.log, stop,
                      duties, watchdog, pace, context.waits, evaluate, compared, peak_speed(spec, shape, device, backend), enough)

    def traced(step: int, result: StepResult) -> None:
        memory = RankMemory(**state_bytes(engine.data.units.values(), engine.optimizer), peak=peak_bytes(device),
                            limit=limit_bytes(device, spec.job.ranks_per_node), activations=result.passed.most_here,
                            away=result.passed.most_away)
        actions = tuple(TracedAction(*span) for span in result.passed.spans)
        write_trace(context.run.trace(context.who.rank), RankTrace(
            context.attempt, context.who.rank, step, actions, memory, context.place.pp))

    bootstrap.status(context, "training")
    context.log.say(f"training from step {counters.step + 1} to {spec.train.steps} on {device}, {backend}")
    watchdog.now("evaluation")
    missing = evaluate(counters.step, None)  # an evaluation that an earlier attempt put off
    watchdog.now("first step")
    ended = TrainingEnd(counters.step, missing) if missing is not None or enough() else trainer.train(counters, traced)
    watchdog.now("step")
    facts.barrier(context.everyone)
    _conclude(context, ended.stopped, f"after step {ended.step}")
    return ended


def _conclude(context: RankContext, reason: str | None, when: str) -> None:
    """Report how training ended. ``reason``: why it stopped; None if all steps are done."""
    phase = "done" if reason is None else "stopped"
    bootstrap.status(context, phase, reason or "")
    context.log.say(f"{phase} {when}" + (f": {reason}" if reason else ""))


def _lost(context: RankContext, error: NodeLost) -> None:
    """Handle a lost node; the heartbeat calls it. A broken connection of a process whose failure is known is ignored."""
    if not error.facts["silent"] and cause_known(context.run, context.attempt):
        die(context, PeerGone(str(error)))
    die(context, error)


def import_model_code(family: Family) -> None:
    """Import what ``assemble`` builds this family's models of. That takes as long as the import of torch, so ranks meet before.
    Raises HpcMpError if a library of the rank half is missing."""
    need_train("a rank")
    with uncollected():
        import hpc_mp.train.rank.assemble  # noqa: F401

        for module in family.modules:
            importlib.import_module(module)
    capture_transformers()
