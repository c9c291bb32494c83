"""What pyxis' options of srun or sbatch become: keys of ``[slurm]`` where these say the same, else named with the reason."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any

from hpc_mp.adopt.expand import FixedValues, fields
from hpc_mp.adopt.launches import LaunchCall
from hpc_mp.lint.sbatch.options import Option, parse, syntax
from hpc_mp.lint.sbatch.word import Word

_UNKNOWN = "\ue003"  # stands for a word that only the job's shell can tell


@dataclass(frozen=True, slots=True)
class StepContainer:
    """A container as keys of the job file.

    Attributes:
        said: each option with the key that says it, empty where none does, and why not.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    said: tuple[tuple[Option, str, str], ...] = ()

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(f"--{option.name}: {key}" for option, key, _ in self.said if key)

    @property
    def lost(self) -> tuple[str, ...]:
        return tuple(why for _, _, why in self.said if why)


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
    given = tuple(options)
    image = any(each.name == "container-image" and each.value and _UNKNOWN not in each.value for each in given)
    keys: dict[str, Any] = {"slurm.container_runtime": "pyxis"} if image else {}
    said = []
    for option in given:
        key, value, why = _KEYS.get(option.name, ""), option.value or "", ""
        if not key:
            why = f"--{option.name} has no counterpart in a job file"
        elif not value or _UNKNOWN in value:
            why = f"--{option.name} is known to the job's shell alone: set {key}"
        elif not image:
            why = f"--{option.name} says nothing without an image: set slurm.container and {key}"
        else:
            keys[key] = tuple(filter(None, value.split(","))) if option.name == "container-mounts" else value
        said.append((option, "" if why else key, why))
    return StepContainer(keys, tuple(said))


_KEYS = {"container-image": "slurm.container", "container-mounts": "slurm.container_mounts",
         "container-workdir": "program.directory"}
