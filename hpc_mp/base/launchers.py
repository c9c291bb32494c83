"""The programs that start the ranks of another program: their names, their options, and where the program's own words begin."""

from __future__ import annotations

import tomllib
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from hpc_mp.base.assets import asset


@dataclass(frozen=True, slots=True)
class Launcher:
    """A program that starts ranks.

    Attributes:
        family: the syntax of its options.
        verb: the first argument with which it starts ranks; empty if it always does.
        modules: Python modules that do the same.
    """

    family: Literal["srun", "mpi", "other"] = "other"
    verb: str = ""
    modules: tuple[str, ...] = ()


_MPI = Launcher("mpi")
LAUNCHERS: dict[str, Launcher] = {
    "srun": Launcher("srun"),
    "mpirun": _MPI, "mpiexec": _MPI, "mpiexec.hydra": _MPI, "orterun": _MPI, "prterun": _MPI, "prun": _MPI,
    "ibrun": Launcher(), "jsrun": Launcher(), "aprun": Launcher(),
    "torchrun": Launcher(modules=("torch.distributed.run", "torch.distributed.launch", "torch.distributed.elastic")),
    "accelerate": Launcher(verb="launch", modules=("accelerate.commands.launch", "accelerate.commands.accelerate_cli")),
    "deepspeed": Launcher(modules=("deepspeed.launcher.runner", "deepspeed.launcher.launch")),
    "horovodrun": Launcher(modules=("horovod.runner.launch",)),
    "composer": Launcher(modules=("composer.cli.launcher",)),
    "colossalai": Launcher(verb="run"),
    "torchx": Launcher(verb="run"),
}
MPIRUNS = frozenset({*(name for name, launcher in LAUNCHERS.items() if launcher.family == "mpi"), "ibrun"})
MODULES = frozenset(module for launcher in LAUNCHERS.values() for module in launcher.modules)


@cache
def _values_of_mpirun() -> dict[str, int]:
    """Return the number of values of each option of mpirun."""
    table = tomllib.loads(asset("slurm/mpirun-options.toml").read_text(encoding="utf-8"))
    return {name: values for values, key in enumerate(("none", "one", "two")) for name in table[key]}


def program_of_mpirun(words: Sequence[str]) -> tuple[int, ...] | None:
    """Return where the programs begin among the arguments of an mpirun: one index per ``:``-separated part.

    None if the arguments do not show it: an unknown option, which may have a value, or programs that a file names.
    """
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
