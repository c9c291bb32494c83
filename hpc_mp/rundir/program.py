"""``program.json``: the command that every rank of a program executes, and the variables that identify the rank."""

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_mp.base.files import owners, render_json, write_text
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import read_record

if TYPE_CHECKING:  # a rank imports this module and may lack the libraries that validate job files
    from hpc_mp.job import ProgramSpec


OWN_PATH = "HPC_MP_PATH"  # the job's PATH, to which an entry was added only for mpirun


@dataclass(frozen=True, slots=True)
class ProgramCommand:
    """A program and the form of its start.

    Attributes:
        command: the program and its arguments; not read by a shell.
        directory: its working directory.
        environment: additional variables.
        ranks_per_node: number of ranks that it starts itself on every node, if it is started once per node; None if it is
            started once per rank.
        axes: True if it has axes; its ranks are then given their coordinates.
        mpi: True if its ranks meet through MPI, which identifies each of them.
        mpirun: True if mpirun starts them in Slurm jobs too.
        script: True if it is a job script, which starts ranks itself.
        signal: the signal that asks it to stop, by its name without SIG.
        stop_codes: exit codes by which it reports that it has saved.
    """

    command: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    ranks_per_node: int | None = None
    axes: bool = False
    mpi: bool = False
    mpirun: bool = False
    script: bool = False
    signal: str = "TERM"
    stop_codes: tuple[int, ...] = ()


def write_program(path: Path, spec: "ProgramSpec") -> None:
    """Write ``program.json``, readable only by the run's owner: arguments and variables may be passwords. Raises OSError."""
    program = spec.program
    itself = spec.job.ranks_per_node if program.start == "node" else None
    command = ProgramCommand(program.command, program.directory, program.environment, itself, program.axes is not None,
                             program.start == "mpi", spec.by_mpirun, spec.by_script, program.signal, program.stop_codes)
    _write(path, command)


def use_staged(path: Path, prefix: Path) -> None:
    """Make ranks look up the program on PATH, on which the copy of an environment comes first, if the command names it by its
    path in that environment. Raises OSError. ``prefix``: directory of the environment."""
    program = read_program(path)
    name = Path(program.command[0])
    if name.is_absolute() and name.parent == prefix / "bin":
        _write(path, replace(program, command=(name.name, *program.command[1:])))


def _write(path: Path, command: ProgramCommand) -> None:
    write_text(path, render_json(asdict(command)), opener=owners)


def read_program(path: Path) -> ProgramCommand:
    """Read ``program.json``. Raises OSError, or ValueError for another document."""
    return read_record(path, ProgramCommand)


def own_variables(program: ProgramCommand, run: RunDirectory, placement: Placement, rank: int,
                  meeting: tuple[str, str]) -> dict[str, str]:
    """Return the variables that identify a rank or the one command of a node; empty if MPI identifies it. ``meeting``: address
    and port of rank 0's host; no process listens there yet."""
    if program.mpi:
        return {}
    if program.ranks_per_node is not None:
        return node_variables(placement, placement.ranks[rank].node, *meeting)
    axes = axis_variables(placement, rank, run.placement) if program.axes else {}
    return rank_variables(placement, rank, *meeting) | axes


def rank_variables(placement: Placement, rank: int, address: str, port: str) -> dict[str, str]:
    """Return a rank's identity and the rendezvous address in torchrun's variables. NODE_RANK, which Lightning reads, equals
    GROUP_RANK. ``address``, ``port``: address and port of rank 0's host; no process listens there yet."""
    place = placement.ranks[rank]
    node = str(place.node)
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(place.local_rank),
        "WORLD_SIZE": str(len(placement.ranks)),
        "LOCAL_WORLD_SIZE": str(sum(other.node == place.node for other in placement.ranks)),
        "GROUP_RANK": node,
        "NODE_RANK": node,
        "MASTER_ADDR": address,
        "MASTER_PORT": port,
    }


def axis_variables(placement: Placement, rank: int, file: Path) -> dict[str, str]:
    """Return a rank's coordinates on the program's axes, the sizes of the axes, and the file with the places of all ranks."""
    place, degrees = placement.ranks[rank], placement.degrees
    sizes = {"tp": degrees.tensor, "pp": degrees.pipeline, "cp": degrees.context, "dp": degrees.data}
    at = {f"HPC_MP_{axis.upper()}_RANK": str(getattr(place, axis)) for axis in sizes}
    return at | {f"HPC_MP_{axis.upper()}_SIZE": str(size) for axis, size in sizes.items()} | {"HPC_MP_PLACEMENT": str(file)}


def node_variables(placement: Placement, node: int, address: str, port: str) -> dict[str, str]:
    """Return the variables of a command that is started once per node; it numbers its ranks itself."""
    return {"NODE_RANK": str(node), "NNODES": str(placement.nodes), "MASTER_ADDR": address, "MASTER_PORT": port}


def filled_in(program: ProgramCommand, run: Path, variables: Mapping[str, str]) -> tuple[str, ...]:
    """Return the command of a node: placeholders replaced by the values of ``node_variables``, every other brace unchanged."""
    values = {"{nodes}": variables["NNODES"], "{node_rank}": variables["NODE_RANK"],
              "{ranks_per_node}": str(program.ranks_per_node), "{master_addr}": variables["MASTER_ADDR"],
              "{master_port}": variables["MASTER_PORT"], "{run}": str(run)}
    pattern = re.compile("|".join(map(re.escape, values)))
    return tuple(pattern.sub(lambda match: values[match[0]], word) for word in program.command)


def run_variables(run: Path, attempt: int) -> Mapping[str, str]:
    """Return variables that describe the run to a program: a later attempt should resume an earlier one's saved state."""
    return {"HPC_MP_RUN": str(run), "HPC_MP_ATTEMPT": str(attempt), **({"HPC_MP_RESUME": "1"} if attempt > 1 else {})}
