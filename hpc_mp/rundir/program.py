"""``program.json``: what every rank of a program becomes, byte for byte; and the variables that tell it who it is."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_mp.base.files import owners, render_json, write_text
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir.layout import RunDirectory
from hpc_mp.rundir.records import read_record

if TYPE_CHECKING:  # a rank reads what is written here, and need not have what validates job files
    from hpc_mp.job import ProgramSpec


OWN_PATH = "HPC_MP_PATH"  # the job's PATH, to which something was added for mpirun alone


@dataclass(frozen=True, slots=True)
class ProgramCommand:
    """A program, as ranks start it.

    Attributes:
        command: it and its arguments; no shell reads them.
        directory: in which it runs.
        environment: variables of its own.
        ranks_per_node: that it starts itself on every node, where it is started once per node; None: it is started once per rank.
        axes: whether it has axes, of which its ranks are told their coordinates.
        mpi: whether its ranks meet through MPI, which tells each of them who it is.
        mpirun: whether mpirun starts them in a job of Slurm too.
        signal: that asks it to stop, by its name without SIG.
        stop_codes: by which it says that it has saved.
    """

    command: tuple[str, ...]
    directory: str
    environment: dict[str, str]
    ranks_per_node: int | None = None
    axes: bool = False
    mpi: bool = False
    mpirun: bool = False
    signal: str = "TERM"
    stop_codes: tuple[int, ...] = ()


def write_program(path: Path, spec: ProgramSpec) -> None:
    """For the eyes of the run's owner: arguments and variables may be passwords. Raises OSError."""
    given = spec.program
    itself = spec.job.ranks_per_node if given.start == "node" else None
    command = ProgramCommand(given.command, given.directory, given.environment, itself, given.axes is not None,
                             given.start == "mpi", spec.by_mpirun, given.signal, given.stop_codes)
    _write(path, command)


def use_staged(path: Path, prefix: Path) -> None:
    """Have ranks look up on PATH, where the copy of an environment comes first, a program that the command names by its path in
    that environment. Raises OSError.

    Args:
        prefix: directory of the environment.
    """
    program = read_program(path)
    name = Path(program.command[0])
    if name.is_absolute() and name.parent == prefix / "bin":
        _write(path, replace(program, command=(name.name, *program.command[1:])))


def _write(path: Path, command: ProgramCommand) -> None:
    write_text(path, render_json(asdict(command)), opener=owners)


def read_program(path: Path) -> ProgramCommand:
    """Raises OSError, or ValueError when it is no such document."""
    return read_record(path, ProgramCommand)


def own_variables(program: ProgramCommand, run: RunDirectory, placement: Placement, rank: int,
                  meeting: tuple[str, str]) -> dict[str, str]:
    """Who a rank is, or the one command of a node; nothing where MPI says it.

    Args:
        meeting: address and port of rank 0's host, on which nobody listens yet.
    """
    if program.mpi:
        return {}
    if program.ranks_per_node is not None:
        return node_variables(placement, placement.ranks[rank].node, *meeting)
    axes = axis_variables(placement, rank, run.placement) if program.axes else {}
    return rank_variables(placement, rank, *meeting) | axes


def rank_variables(placement: Placement, rank: int, address: str, port: str) -> dict[str, str]:
    """Who a rank is and where all meet, as torchrun says it; NODE_RANK, which Lightning reads, is the same as GROUP_RANK.

    Args:
        address, port: of rank 0's host, on which nobody listens yet.
    """
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
    """The coordinates of a rank on the program's axes, how large these are, and the file that has those of all ranks."""
    place, degrees = placement.ranks[rank], placement.degrees
    sizes = {"tp": degrees.tensor, "pp": degrees.pipeline, "cp": degrees.context, "dp": degrees.data}
    at = {f"HPC_MP_{axis.upper()}_RANK": str(getattr(place, axis)) for axis in sizes}
    return at | {f"HPC_MP_{axis.upper()}_SIZE": str(size) for axis, size in sizes.items()} | {"HPC_MP_PLACEMENT": str(file)}


def node_variables(placement: Placement, node: int, address: str, port: str) -> dict[str, str]:
    """The same for a command that is started once per node; its ranks it numbers itself."""
    return {"NODE_RANK": str(node), "NNODES": str(placement.nodes), "MASTER_ADDR": address, "MASTER_PORT": port}


def filled_in(program: ProgramCommand, run: Path, own: Mapping[str, str]) -> tuple[str, ...]:
    """The command of a node: placeholders replaced by what ``node_variables`` says, every other brace left as it is."""
    values = {"{nodes}": own["NNODES"], "{node_rank}": own["NODE_RANK"], "{ranks_per_node}": str(program.ranks_per_node),
              "{master_addr}": own["MASTER_ADDR"], "{master_port}": own["MASTER_PORT"], "{run}": str(run)}
    pattern = re.compile("|".join(map(re.escape, values)))
    return tuple(pattern.sub(lambda found: values[found[0]], word) for word in program.command)


def run_variables(run: Path, attempt: int) -> Mapping[str, str]:
    """What a program may want to know of its run: a later attempt is to go on from what an earlier one has saved."""
    return {"HPC_MP_RUN": str(run), "HPC_MP_ATTEMPT": str(attempt), **({"HPC_MP_RESUME": "1"} if attempt > 1 else {})}
