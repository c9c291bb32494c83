"""``program.sh``: the script that every rank of a program runs inside of a container.

Outside of containers ``hpc_mp.program`` determines the rank of a process and becomes the program. The image of a user's program
has no hpc-mp, and perhaps no Python. So the script, with all facts that a rank needs, is written before the ranks start, for
any POSIX shell. The constant half is ``slurm/rank-in-container.sh``.
"""

import json
import shlex
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence

from hpc_mp.base.assets import asset
from hpc_mp.base.files import owners, write_text
from hpc_mp.base.programs import BETWEEN, IDENTITY
from hpc_mp.job import ProgramSpec
from hpc_mp.layout.placement import Placement
from hpc_mp.rundir import AttemptRecord, RunDirectory
from hpc_mp.rundir.program import ProgramCommand, filled_in, own_variables, read_program, run_variables
from hpc_mp.supervisor.context import AttemptContext

# Variables of the job script (slurm/job.sbatch.j2) that an image may set too; without the script, the image's values would win.
SAID_AGAIN = ("HPC_MP_LOCAL", "HPC_MP_STAGED", "OMP_NUM_THREADS", "TRITON_CACHE_DIR", "TORCHINDUCTOR_CACHE_DIR",
              "CUDA_CACHE_PATH", "NCCL_DEBUG", "NCCL_DEBUG_FILE", "TORCH_FR_DUMP_TEMP_FILE")


def write_program_script(attempt: AttemptContext, spec: ProgramSpec, before: Mapping[str, str]) -> None:
    """Write the script of this attempt, readable only by the run's owner. ``before``: the job script's environment, without the
    profile's changes. Raises OSError if the run directory cannot be written."""
    environ = attempt.base_environ
    profiled = [name for name, value in environ.items() if before.get(name) != value]
    names = dict.fromkeys((*SAID_AGAIN, *profiled, *spec.environment.set))
    again = {name: environ[name] for name in names if name in environ} | {"TMPDIR": f"{environ['HPC_MP_LOCAL']}/tmp"}
    text = program_script(read_program(attempt.run.program), attempt.run, attempt.placement, attempt.record, again)
    write_text(attempt.run.program_script, text, opener=owners)


def program_script(program: ProgramCommand, run: RunDirectory, placement: Placement, record: AttemptRecord,
                   again: Mapping[str, str]) -> str:
    """Return the text of ``program.sh``. Pure. ``record``: record of the attempt, with its hosts and rendezvous address.
    ``again``: variables that must keep their outside values, whatever the image sets."""
    by_rank = [own_variables(program, run, placement, rank, (record.address, str(record.port)))
               for rank in range(len(placement.ranks))]
    alike = {name: value for name, value in by_rank[0].items() if all(variables[name] == value for variables in by_rank)}
    common = {**again, **program.environment, **alike, **run_variables(run.path, record.attempt)}
    words = _words(program, run, by_rank[0])
    facts = {
        "hpc_mp_token": record.token, "hpc_mp_attempt": str(record.attempt),
        "hpc_mp_failures": str(run.failure(record.attempt, 0)).removesuffix("-rank-00000.json"),
        "hpc_mp_ours": " ".join((*IDENTITY, *BETWEEN)),
        "hpc_mp_directory": program.directory, "hpc_mp_directory_json": _json(program.directory),
        "hpc_mp_name_json": _json(program.command[0])}
    places = (f"{shlex.quote(seat)}) hpc_mp_rank={rank}{_exports(by_rank[rank], alike)} ;;"
              for seat, rank in _seats(placement, record.hosts))
    return "\n".join((
        f"# The program of the ranks of attempt {record.attempt} in their container; hpc-mp writes this file for each attempt.",
        *(f"{name}={shlex.quote(value)}" for name, value in facts.items()),
        "hpc_mp_place() {", 'case "$1" in', *places, "*) return 1 ;;", "esac", f"hpc_mp_name={words[0]}", "}",
        "hpc_mp_tell() {", f":{_exports(common)}", "}",
        "hpc_mp_become() {", f"exec {' '.join(words)}", "}",
        asset("slurm/rank-in-container.sh").read_text(encoding="utf-8")))


def _seats(placement: Placement, hosts: Sequence[str]) -> Iterator[tuple[str, int]]:
    """Yield the host and Slurm's local number of each task, and its rank."""
    taken: Counter[str] = Counter()
    for place in sorted(placement.ranks, key=lambda place: (place.node, place.local_rank)):
        host = hosts[place.node]
        yield f"{host} {taken[host]}", place.rank
        taken[host] += 1


def _exports(variables: Mapping[str, str], shared: Mapping[str, str] | None = None) -> str:
    """Return shell commands that export the variables that are not set yet."""
    return "".join(f"; export {name}={shlex.quote(value)}" for name, value in variables.items() if name not in (shared or {}))


def _words(program: ProgramCommand, run: RunDirectory, variables: Mapping[str, str]) -> list[str]:
    """Return the command as shell words. Of its placeholders, only the node's number is still unknown."""
    if program.ranks_per_node is None:
        return [shlex.quote(word) for word in program.command]
    pieces = (word.split("\0") for word in filled_in(program, run.path, {**variables, "NODE_RANK": "\0"}))
    return ['"$NODE_RANK"'.join(shlex.quote(piece) for piece in word) for word in pieces]


def _json(text: str) -> str:
    """Return the text escaped for use between the quotation marks of a JSON document."""
    return json.dumps(text)[1:-1]
