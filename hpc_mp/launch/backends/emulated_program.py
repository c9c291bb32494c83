"""The back end for a program on emulated nodes of this machine: every rank is a process that becomes the program."""

import os
import socket
import sys
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from dataclasses import replace

from hpc_mp.base.errors import HpcMpError
from hpc_mp.diagnosis.watchdogs import collective_timeout
from hpc_mp.launch.backends.backend import Launch
from hpc_mp.launch.backends.interrupts import Interrupts
from hpc_mp.launch.backends.watch import RanksEnd, conclude_ranks, judge, watch
from hpc_mp.launch.emulator.emulator import EmulatedRank, Emulator
from hpc_mp.launch.emulator.slurm_env import EMULATED, inherited
from hpc_mp.launch.program.plan import ProgramPlan
from hpc_mp.launch.run_files import begin
from hpc_mp.layout.placement import RankPlace
from hpc_mp.program.stacks import record_stacks
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.attempt import AttemptReader
from hpc_mp.rundir.failures import RankFailure, sentence, write_failure
from hpc_mp.rundir.outcome import Cause, Outcome
from hpc_mp.rundir.program import rank_variables
from hpc_mp.rundir.rank_env import emulated_node
from hpc_mp.supervisor.context import say_begun, say_ended
from hpc_mp.supervisor.prepare import port
from hpc_mp.supervisor.silence import SilenceWatch, add_what_logs_say, explained, rank_files, where

MODULE = "hpc_mp.program.rank"
GPUS = "CUDA_VISIBLE_DEVICES"


def start_program(launch: Launch, plan: ProgramPlan) -> Outcome:
    """Start every rank, follow all to their end and return the outcome. Raises HpcMpError if the run directory cannot be written,
    or this is not Linux."""
    if sys.platform != "linux":
        raise HpcMpError(f"emulated nodes on {sys.platform}", "need Linux", "launch inside a Linux container")
    spec, listener = plan.spec, launch.listener
    shared = {"OMP_NUM_THREADS": str(max(1, len(os.sched_getaffinity(0)) // spec.ranks)), **inherited(os.environ), **EMULATED,
              **spec.environment.set}
    with ExitStack() as stack:
        emulator = stack.enter_context(Emulator([MODULE], shared))
        interrupts = stack.enter_context(Interrupts())
        run, number, lock = stack.enter_context(begin(plan, launch.resumed))
        listener.say(f"run       {run.path}" + (f" (attempt {number})" if number > 1 else ""))
        attempt = AttemptReader(run, number)
        tasks = len(plan.placement.ranks)
        names = [emulated_node(node) for node in range(plan.placement.nodes)]
        say_begun(run, number, plan.placement.ranks, names, spec.job.device)
        emulator.start(_ranks(plan, run, shared), run.path, None, lock, f"{MODULE}:emulated",
                       orderly=(0, *spec.program.stop_codes), patient=True, stop=f"SIG{spec.program.signal}")
        silence = SilenceWatch(spec.program.silent_limit, tasks, rank_files(run, tasks),
                               on_hang=lambda: record_stacks(run, number))
        with listener.following(0):
            ended = watch(emulator, attempt, interrupts, listener, silence.noticed)
    hang = silence.hang
    if hang is not None:
        add_what_logs_say(run, attempt.last_lines)
        hang = explained(hang, run)
        ended = replace(ended, exits=tuple(replace(end, ours=end.ours or end.time >= hang.time) for end in ended.exits))
    waited = collective_timeout({rank: attempt.last_lines(rank) for rank in range(tasks)}, tasks)
    hangs = [(hang.rank, str(hang))] if hang is not None else [(waited.apart, str(waited))] if waited is not None else []
    joint_failures = _joint_failures(ended, attempt, plan, names, hangs)
    state, cause = judge(ended, attempt, plan.placement, joint_failures, spec.program)
    if cause is not None and cause.kind == "hang" and hangs and hangs[0][0] is None:
        cause = Cause("hang", sentence("the job", "hang", hangs[0][1]), time=cause.time)
    elif cause is not None:
        for failure in joint_failures:
            if failure.rank == cause.rank and failure.kind != cause.kind:
                continue  # the rank's own record is more specific
            with suppress(OSError):  # a full disk must not hide how the run ended
                write_failure(run, failure)
    say_ended(run, number, state)
    return conclude_ranks(attempt, state, cause, listener, *([where(run)] if hang is not None else ()))


def _joint_failures(ended: RanksEnd, attempt: AttemptReader, plan: ProgramPlan, names: Sequence[str],
                    hangs: Sequence[tuple[int | None, str]]) -> list[RankFailure]:
    """Return failures that no single process end shows: a hang of all ranks, and ranks that had ended successfully before the
    others failed. ``hangs``: the rank that the others waited for, None if it cannot be determined, and a description."""
    bad = [end for end in ended.exits if end.code not in (0, *plan.spec.program.stop_codes)]
    if not bad or (ended.interrupted and not hangs):
        return []

    def failure(rank: int, kind: str, message: str, moment: float) -> RankFailure:
        place: RankPlace = plan.placement.ranks[rank]
        return RankFailure(rank, names[place.node], kind, message, moment, attempt.number,
                           of_node=plan.spec.program.start == "node")

    failures = [failure(rank or 0, "hang", text, time.time()) for rank, text in hangs]
    first_bad = min(bad, key=lambda end: end.time)
    earlier = [end for end in ended.exits if end.code == 0 and end.time < first_bad.time]
    if earlier:
        first = min(earlier, key=lambda end: end.time)
        detail = f"{first_bad.time - first.time:.0f} s before {'all were silent' if hangs else f'rank {first_bad.rank} failed'}"
        failures.append(failure(first.rank, "early", f"with exit code 0, {detail}", first.time))
    return failures


def _ranks(plan: ProgramPlan, run: RunDirectory, shared: Mapping[str, str]) -> list[EmulatedRank]:
    """Return all ranks in order. Rank 0 will listen on a port of this machine that is free now."""
    master_port = str(_free_port(run))
    ranks = []
    for place in plan.placement.ranks:
        environ = rank_variables(plan.placement, place.rank, "127.0.0.1", master_port)
        # The forking process has the launcher's search path; the program gets the user's own.
        environ |= {"PYTHONPATH": shared.get("PYTHONPATH", ""), "SLURMD_NODENAME": emulated_node(place.node)}
        environ |= _gpus(plan, place.node, shared)
        ranks.append(EmulatedRank(run.rank_log(place.rank), environ))
    return ranks


def _gpus(plan: ProgramPlan, node: int, shared: Mapping[str, str]) -> dict[str, str]:
    """Return the GPUs of an emulated node. Every node has its own, so that no two ranks with the same local number share one."""
    per_node = plan.spec.job.ranks_per_node
    if plan.device.kind != "cuda" or len(plan.device.pools) < plan.spec.ranks or plan.placement.nodes == 1:
        return {}
    visible = shared[GPUS].split(",") if shared.get(GPUS) else list(map(str, range(plan.spec.ranks)))
    return {GPUS: ",".join(visible[node * per_node:(node + 1) * per_node])}


def _free_port(run: RunDirectory) -> int:
    """Return a free port below the ephemeral range, so that no connection takes it before rank 0 does."""
    for count in range(100):
        candidate = port(run.path, f"{os.getpid()}.{count}")
        with suppress(OSError), socket.create_server(("127.0.0.1", candidate)):
            return candidate
    raise HpcMpError("MASTER_PORT", "cannot be found: 100 ports of this machine are taken", "end what listens on them")

