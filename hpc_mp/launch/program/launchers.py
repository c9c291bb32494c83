"""Launchers, commands that start ranks themselves: as the command of every rank, one would start ranks times ranks."""

import re
import shlex
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path, PurePath

from hpc_mp.base import launchers as base
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.launchers import MODULES, MPIRUNS
from hpc_mp.base.programs import PYTHON
from hpc_mp.cluster.slurm.allocation import STARTERS
from hpc_mp.job import ProgramSpec
from hpc_mp.lint.sbatch.shell import PREFIXES, SHELLS, for_a_shell, read_shell

LAUNCHERS = STARTERS | base.LAUNCHERS.keys()
# Programs that become another one, whose name follows their own options.
BEFORE = PREFIXES.keys() | {"ionice", "taskset", "uv", "poetry", "pixi", "conda", "mamba", "micromamba", "nsys", "ncu", "strace",
                            "ltrace", "perf", "apptainer", "singularity"}
SCRIPT = re.compile(r".+\.(py|pyz)")

# Options that a torch launcher needs on each of several nodes; without them each node trains alone.
MEET = ("--nnodes {nodes} --node-rank {node_rank} --nproc-per-node {ranks_per_node} --master-addr {master_addr} "
        "--master-port {master_port}")

# Options of launchers for the number of nodes, and of ranks on each.
NODES = frozenset(row.nodes for row in base.LAUNCHERS.values() if row.nodes)
RANKS_PER_NODE = frozenset({*(row.per_node for row in base.LAUNCHERS.values() if row.per_node), "npernode"})  # of Open MPI

# Words of scripts that act differently on each node.
APART = re.compile(r"NODE_?RANK|NODE_?ID|PROCID|node_rank|hostname|localhost", re.IGNORECASE)
MOST = 1 << 16  # maximum of characters read from a file


def check_command(spec: ProgramSpec) -> None:
    """Refuse a launcher as the command of every rank, which would start all of them again. As a node's command, refuse one of
    Slurm's, and one without a rendezvous address for the nodes. Raises HpcMpError."""
    command = spec.program.command
    if spec.by_script:
        return
    value, name = f"program.command = {shlex.join(command)}", launcher(command)
    mpirun = _on_all_nodes(spec) if spec.program.start == "node" and spec.job.nodes > 1 else None
    if mpirun is not None:
        raise HpcMpError(
            value, f"starts ranks on all {spec.job.nodes} nodes itself ({mpirun}), and is started on each of them",
            f'leave {mpirun} out, with program.start = "mpi" and slurm.mpi = "mpirun" (or "pmix", "pmi2"); or have the first '
            'node alone run it: if [ "$NODE_RANK" = 0 ]')
    if name is None:
        return
    if spec.program.start == "node":
        if name in STARTERS:
            raise HpcMpError(value, f"starts tasks on all nodes itself ({name}), and is started on each of them",
                             f"leave {name} out: hpc-mp starts the command once on every node")
        if spec.job.nodes > 1 and "torch" in name and not any("{master_addr}" in word for word in command):
            raise HpcMpError(value, f"does not say where the {spec.job.nodes} nodes meet, so that each would train alone",
                             f"write {name} {MEET} and then the program")
        return
    script_index = next((number for number, word in enumerate(command) if SCRIPT.fullmatch(word)), None)
    inner = shlex.join(["python", *command[script_index:]]) if script_index is not None else "and then the program that it starts"
    nodes, per_node = (_option_number(command, names) or default for names, default in (
        (NODES, spec.job.nodes), (RANKS_PER_NODE, spec.job.ranks_per_node)))
    raise HpcMpError(value, f"starts ranks by itself ({name}), and every rank would start all of them again",
                     f"leave {name} out, for hpc-mp starts the ranks: hpc-mp run --nodes {nodes} --ranks-per-node "
                     f'{per_node} -- {inner}; or set program.start = "node"')


def _on_all_nodes(spec: ProgramSpec) -> str | None:
    """Return the mpirun that the command or its shell script would start on every node; None if none is found."""
    command, name = spec.program.command, launcher(spec.program.command)
    text = "\n".join(_shell_lines(command, Path(spec.program.directory)))
    shell = read_shell(text)
    started = name if name in MPIRUNS else next((call.name for call in shell.commands if call.name in MPIRUNS), None)
    for _, comment in shell.comments:
        text = text.replace(comment, "")
    return None if APART.search(text) or APART.search(shlex.join(command)) else started


def _shell_lines(command: Sequence[str], directory: Path) -> Iterator[str]:
    """Yield the texts of a command that a shell reads: words with shell code, and scripts."""
    shell = any(PurePath(word).name in SHELLS for word in command)
    for word in command:
        text = word if shell and " " in word else ""
        with suppress(OSError, ValueError), open(directory / word, encoding="utf-8", errors="replace") as file:
            text = file.read(MOST)  # else it is not a file, or not a valid file name
        if shell or for_a_shell(text.partition("\n")[0]):
            yield text


def _option_number(command: Sequence[str], names: frozenset[str]) -> int | None:
    """Return the number given by an option of a launcher, in its own spelling."""
    for word, next_word in zip(command, (*command[1:], ""), strict=True):
        name, equals, value = word.lstrip("-").replace("_", "-").partition("=")
        text = value if equals else next_word
        if word.startswith("-") and name in names and text.isdecimal() and int(text):
            return int(text)
    return None


def launcher(command: Sequence[str]) -> str | None:
    """Return the name of the launcher that a command is; None for a program. Those in a shell line or a script are not found."""
    wrapped = False
    for number, word in enumerate(command):
        name = PurePath(word).name
        if name in LAUNCHERS:
            return name
        if PYTHON.fullmatch(name):
            return _module(command[number + 1:])
        wrapped = wrapped or name in BEFORE
        if not wrapped or SCRIPT.fullmatch(name):
            return None
    return None


def _module(arguments: Sequence[str]) -> str | None:
    """Return the launcher that Python runs as a module, or as the file of an installed program."""
    words = iter(arguments)
    for word in words:
        if word in ("-X", "-W"):  # options of Python with a value
            next(words, None)
        elif word == "-m" or word.startswith("-m"):
            module = word[2:] or next(words, "")
            is_launcher = any(module == package or module.startswith(f"{package}.") for package in MODULES)
            return f"python -m {module}" if is_launcher or module in LAUNCHERS else None
        elif not word.startswith("-"):
            name = PurePath(word).name
            return name if name in LAUNCHERS else None
    return None
