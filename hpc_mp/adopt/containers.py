"""What pyxis' options of srun or sbatch become: keys of ``[slurm]`` where these say the same, else named with the reason."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

from hpc_mp.adopt.expand import FixedValues, fields
from hpc_mp.adopt.launches import LaunchCall
from hpc_mp.lint.sbatch.options import Option, parse, syntax
from hpc_mp.lint.sbatch.word import Word

_UNKNOWN = "\ue003"  # stands for a word that only the job's shell can tell


@dataclass(frozen=True, slots=True)
class StepContainer:
    """``kept`` and ``lost`` are words for the account."""

    keys: dict[str, Any] = field(default_factory=dict)
    kept: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()


def step_container(launch: LaunchCall, fixed: FixedValues) -> StepContainer:
    """The container that an srun starts its tasks in, as far as the script's text tells."""
    words: list[Word] = []
    for each in launch.call.arguments:
        known = fields(each.source, fixed)
        if known is None:
            name, equals, _ = each.source.partition("=")
            known = (f"{name}={_UNKNOWN}" if equals and name.startswith("--") else _UNKNOWN,)
        words += [Word(text, each.word.line) for text in known]
    at = next((at for at, word in enumerate(words) if word.base == "srun"), len(words))
    found = [each for each in parse(words[at + 1:], syntax("srun"), permute=False)[0] if "container" in each.name]
    seen = {each.name for each in found}
    return container_of((*found, *(Option(each.name, _UNKNOWN, each.line, each.known) for each in launch.options
                                   if "container" in each.name and each.name not in seen)))


def container_of(options: Iterable[Option]) -> StepContainer:
    """The container that options of pyxis name."""
    keys: dict[str, Any] = {}
    kept, lost = [], []
    for option in options:
        value = option.value or ""
        if option.name in _KEYS and (not value or _UNKNOWN in value):
            lost.append(f"--{option.name} is known to the job's shell alone: set {_KEYS[option.name]}")
        elif option.name in _KEYS:
            said = tuple(filter(None, value.split(","))) if option.name == "container-mounts" else value
            keys[_KEYS[option.name]] = said
            kept.append(f"--{option.name}: {_KEYS[option.name]}")
        else:
            lost.append(f"--{option.name} has no counterpart in a job file")
    if "slurm.container" in keys:
        keys["slurm.container_runtime"] = "pyxis"
    else:  # without an image the others say nothing
        keys.clear()
        lost += [f"{each}, without an image" for each in kept]
        kept.clear()
    return StepContainer(keys, tuple(kept), tuple(lost))


_KEYS = {"container-image": "slurm.container", "container-mounts": "slurm.container_mounts",
         "container-workdir": "program.directory"}
