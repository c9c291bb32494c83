"""The programs that start the ranks of another program: their names, their options, and where the program's own words begin."""

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hpc_mp.base.assets import asset_table


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts ranks. Names of options are without their dashes."""

    family: Literal["srun", "mpi", "other"] = "other"  # the syntax of its options
    verb: str = ""  # the first argument with which it starts ranks; empty if it always does
    modules: tuple[str, ...] = ()  # Python modules that do the same
    # nodes, node_rank, per_node: options for the number of nodes, the number of this node, and the ranks on each node
    nodes: str = ""
    node_rank: str = ""
    per_node: str = ""
    elsewhere: tuple[str, ...] = ()  # options that set these by other means; ``*`` is a variable with any option
    flags: frozenset[str] = frozenset()  # options without a value, if hpc-mp reads the options of this launcher of a node's ranks

    @property
    def of_node(self) -> bool:
        """True if it starts the ranks of one node, which its options name."""
        return bool(self.flags)


_MPI = Launcher("mpi", per_node="ppn")
LAUNCHERS: dict[str, Launcher] = {
    "srun": Launcher("srun", nodes="nodes", per_node="ntasks-per-node"),
    "mpirun": _MPI, "mpiexec": _MPI, "mpiexec.hydra": _MPI, "orterun": _MPI, "prterun": _MPI, "prun": _MPI,
    "ibrun": Launcher(), "jsrun": Launcher(), "aprun": Launcher(),
    "torchrun": Launcher(
        modules=("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic"), nodes="nnodes",
        node_rank="node-rank", per_node="nproc-per-node", elsewhere=("*",),
        flags=frozenset({"standalone", "module", "m", "no-python", "run-path", "use-env"})),
    "accelerate": Launcher(
        verb="launch", modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli"), nodes="num-machines",
        node_rank="machine-rank", elsewhere=("config-file", "*"),
        flags=frozenset({"multi-gpu", "cpu", "tpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "same-network", "m", "module",
                         "no-python", "debug", "quiet", "q"})),
    "deepspeed": Launcher(
        modules=("deepspeed.launcher.runner", "deepspeed.launcher.launch"), nodes="num-nodes", node_rank="node-rank",
        per_node="num-gpus", elsewhere=("hostfile", "H", "launcher", "no-ssh", "include", "i", "*"),
        flags=frozenset({"no-ssh", "force-multi", "module", "no-python", "save-pid", "no-local-rank"})),
    "horovodrun": Launcher(modules=("horovod.runner.launch",)),
    "composer": Launcher(modules=("composer.cli.launcher",)),
    "colossalai": Launcher(verb="run"),
    "torchx": Launcher(verb="run"),
}
MPIRUNS = frozenset({*(name for name, launcher in LAUNCHERS.items() if launcher.family == "mpi"), "ibrun"})
MODULES = {module: name for name, launcher in LAUNCHERS.items() for module in launcher.modules}
"""The launcher that each module is."""


@cache
def _values_of_mpirun() -> dict[str, int]:
    """Return the number of values of each option of mpirun."""
    table = asset_table("slurm/mpirun-options.toml")
    return {name: values for values, key in enumerate(("none", "one", "two")) for name in table[key]}


def program_of_mpirun(words: Sequence[str]) -> tuple[int, ...] | None:
    """Return where the programs begin among the arguments of an mpirun: one index per ``:``-separated part. None if the arguments
    do not show it: an unknown option, which may have a value, or programs that a file names."""
    values, places, at = _values_of_mpirun(), [], 0
    while at < len(words):
        while at < len(words) and words[at].startswith("-"):
            name, equals, _ = words[at].lstrip("-").partition("=")
            if not equals and name not in values:
                return None
            at += 1 + (0 if equals else values[name])
        if at >= len(words) or words[at] == ":":
            return None
        places.append(at)
        at = next((place + 1 for place in range(at, len(words)) if words[place] == ":"), len(words))
    return tuple(places) or None
