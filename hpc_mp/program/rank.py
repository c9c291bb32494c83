"""The transition from a launched process to the user's program: its rank, its place, and its environment.

The process becomes the program (``exec``): its signals, exit code and memory are the program's own.
"""

import os
import re
import resource
import signal
import sys
import time
from collections.abc import Iterable, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import NoReturn

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.programs import BETWEEN, IDENTITY
from hpc_mp.base.text import counted
from hpc_mp.layout.placement import Placement, from_dict
from hpc_mp.program.guard import guard, guards
from hpc_mp.program.mpirun import by_agent
from hpc_mp.program.stepd import watch_stepd
from hpc_mp.rundir import TOKEN, AttemptRecord, RunDirectory, read_attempt, read_json
from hpc_mp.rundir.failures import RankFailure, write_failure
from hpc_mp.rundir.program import OWN_PATH, ProgramCommand, filled_in, own_variables, read_program, run_variables
from hpc_mp.rundir.rank_env import RankEnv, at_place, emulated_node, identity, node_name, say_host

EMULATED = "HPC_MP_EMULATED"
MOST_FILES = 1 << 16  # maximum that is checked one by one, in a few milliseconds
OURS = (*BETWEEN, OWN_PATH, *by_agent(""))  # variables that the program does not need
SLOTS, COUNTS = "SLURM_TASKS_PER_NODE", re.compile(r"(?<![\dx])\d+")  # in 1(x2),1: not the number of nodes
# A printed line must reach the log at once, even just before a crash. A crash of native code must write its stack.
DEFAULTS = {"PYTHONUNBUFFERED": "1", "PYTHONFAULTHANDLER": "1"}
# Python ignores SIGPIPE and SIGXFSZ; the job script ignores or blocks the others until its programs can handle them.
RESTORED = (signal.SIGPIPE, signal.SIGXFSZ, signal.SIGUSR2, signal.SIGTERM)


def main(path: Path, environ: Mapping[str, str] = os.environ) -> int:
    """Become the program. Return only on failure: 2, with a record of the reason, or 1 for a rank of an earlier attempt."""
    run = RunDirectory(path)
    record = read_attempt(run.attempt_record) if TOKEN in environ else None
    if record is not None and record.token != environ[TOKEN]:
        print(f"hpc-mp: attempt {environ[TOKEN]} is no longer the run's current one; it ends", file=sys.stderr)
        return 1
    if EMULATED not in environ:
        watch_stepd(run, environ)
    placement = from_dict(read_json(run.placement))
    program = read_program(run.program)
    who = _identity(placement, record, environ, program.mpirun)
    attempt = record.attempt if record else run.attempt()
    if record is not None:
        say_host(run, who)
    meeting = environ.get("MASTER_ADDR", "127.0.0.1"), environ.get("MASTER_PORT", "0")
    variables = own_variables(program, run, placement, who.rank, meeting)
    if program.ranks_per_node is not None:
        program = replace(program, command=filled_in(program, run.path, variables))
    program_environ = environment(program, {**variables, **run_variables(run.path, attempt)}, environ)

    def start() -> int:
        try:
            become(program, program_environ)
        except HpcMpError as error:
            print(f"hpc-mp: {error}", file=sys.stderr, flush=True)
            with suppress(OSError):  # a full disk must not hide the reason: the log has it too
                write_failure(run, RankFailure(who.rank, who.node, "user", f"{who.node}: {error}", time.time(), attempt))
            return 2

    if program.mpi and record is not None and (program.mpirun or not record.hosts):  # mpirun reports little of ranks' ends
        return guard(program, run, who, attempt, start, guards(environ) if record.hosts else run.guards)
    return start()


def emulated(path: Path) -> int:
    """Run ``main`` in a forked process whose inherited open files do not belong to the program."""
    for number in _open_files():
        if number > 2:
            with suppress(OSError):  # the listing's own descriptor is closed by now
                os.set_inheritable(number, False)
    if not os.environ.get("PYTHONPATH"):
        os.environ.pop("PYTHONPATH", None)
    return main(path)


def _open_files() -> Iterable[int]:
    """Return the descriptors of this process; all possible ones if /proc lacks them (in a separate process namespace)."""
    with suppress(OSError):
        return map(int, os.listdir("/proc/self/fd"))
    return range(min(resource.getrlimit(resource.RLIMIT_NOFILE)[0], MOST_FILES))


def environment(program: ProgramCommand, variables: Mapping[str, str], environ: Mapping[str, str]) -> dict[str, str]:
    """Return the program's environment: the job's without internal variables, the program's own, then the rank's identity."""
    ours = (*OURS, "SLURMD_NODENAME") if EMULATED in environ else OURS  # emulated nodes have no Slurm
    inherited = {name: value for name, value in environ.items() if name not in ours and name not in IDENTITY}
    path = {"PATH": environ[OWN_PATH]} if OWN_PATH in environ else {}
    starts = for_launchers(program.ranks_per_node, inherited) if program.ranks_per_node and EMULATED not in environ else {}
    return {**DEFAULTS, **inherited, **path, **starts, **program.environment, **variables}


def for_launchers(ranks_per_node: int, environ: Mapping[str, str]) -> dict[str, str]:
    """Return variables for an mpirun or srun in a node's command: its steps share the resources of our step (else they wait for
    its end), and each node has a slot per rank instead of one for our single task."""
    slots = {name: COUNTS.sub(str(ranks_per_node), environ[name]) for name in (SLOTS,) if name in environ}
    return {"SLURM_OVERLAP": "1", **slots} if slots else {}


def become(program: ProgramCommand, environ: Mapping[str, str]) -> NoReturn:
    """Replace this process by the program. Raises HpcMpError if the directory or the program is missing."""
    name = program.command[0]
    try:
        os.chdir(program.directory)
    except OSError as error:
        raise HpcMpError(f"program.directory = {program.directory!r}", f"cannot be entered ({error.strerror})",
                         "set it to a directory that all nodes see") from None
    for number in RESTORED:
        signal.signal(number, signal.SIG_DFL)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, RESTORED)
    try:
        os.execvpe(name, program.command, {**environ, "PWD": program.directory})
    except FileNotFoundError:
        where = f"PATH = {environ.get('PATH', '')}" if "/" not in name else f"seen from {program.directory}"
        raise HpcMpError(f"program.command[0] = {name!r}", f"does not exist ({where}), or its #! line is wrong",
                         "name a program that all nodes have; slurm.modules, slurm.venv and slurm.conda change PATH") from None
    except OSError as error:
        raise HpcMpError(f"program.command[0] = {name!r}", f"cannot be started ({error.strerror})",
                         "name its interpreter before it, or make it executable with a #! line") from None


def _identity(placement: Placement, record: AttemptRecord | None, environ: Mapping[str, str], mpirun: bool = False) -> RankEnv:
    """Return the identity by the place of this process if hosts were assigned to nodes, else by the launcher's variables."""
    if record is None or not record.hosts or mpirun:
        who = identity(environ)
        if who.world != len(placement.ranks):
            raise HpcMpError(f"{counted(who.world, 'rank')} ({who.source})", f"must be {len(placement.ranks)} as in the run",
                             "start the ranks with the mpirun command of `hpc-mp launch`")
        place = placement.ranks[who.rank]
        if record is not None and record.hosts and (record.hosts[place.node], place.local_rank) != (who.node, who.local_rank):
            raise HpcMpError(f"rank {who.rank} ({who.source})", f"is local rank {who.local_rank} on {who.node}, but must be "
                             f"{place.local_rank} on {record.hosts[place.node]}",
                             "remove the mapping of ranks from mpirun's settings (OMPI_MCA_rmaps_…, PRTE_MCA_rmaps_…, I_MPI_…)")
        return replace(who, node=emulated_node(placement.ranks[who.rank].node)) if EMULATED in environ else who
    if "SLURM_LOCALID" not in environ:
        raise HpcMpError("SLURM_LOCALID", "is not set", "start ranks with srun, like the script of `hpc-mp launch`")
    return at_place(placement, record.hosts, node_name(environ), int(environ["SLURM_LOCALID"]), "Slurm")
