"""Conversion of pyxis' options of srun or sbatch to keys of ``[slurm]``. Options without a matching key are reported."""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Any

from hpc_mp.adopt.blanks import BLANK
from hpc_mp.adopt.expand import FixedValues, fields
from hpc_mp.adopt.launches import LaunchCall
from hpc_mp.cluster.slurm.option_syntax import Option, parse, syntax
from hpc_mp.lint.sbatch.word import Word

_UNKNOWN = "\ue003"  # a word that only the job's shell knows


@dataclass(frozen=True, slots=True)
class StepContainer:
    """A container expressed as keys of the job file.

    Attributes:
        said: each option with its key (empty if none) and the reason if it has none.
        enters: the program's working directory inside the image, if no outside directory is mounted there.
    """

    keys: Mapping[str, Any] = field(default_factory=dict)
    said: tuple[tuple[Option, str, str], ...] = ()
    enters: str = ""

    @property
    def kept(self) -> tuple[str, ...]:
        return tuple(f"--{option.name}: {key}" for option, key, _ in self.said if key)

    @property
    def lost(self) -> tuple[str, ...]:
        inside = () if self.enters or not self.keys or "program.directory" in self.keys else (
            "without --container-workdir the program began in the image's own directory, and now begins in program.directory",)
        return (*(why for _, _, why in self.said if why), *inside)


def step_container(launch: LaunchCall, fixed: FixedValues) -> StepContainer:
    """Return the container in which an srun starts its tasks, as far as the script's text shows."""
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
    return container_of(fixed.directory, (*found, *(Option(each.name, _UNKNOWN, each.line, each.is_known)
                                   for each in launch.options if "container" in each.name and each.name not in seen)))


def container_of(directory: str | None, options: Iterable[Option]) -> StepContainer:
    """Return the container that options of pyxis describe.

    Args:
        directory: the base of relative paths; None if unknown.
    """
    given = {each.name: each for each in options}
    image = (found := given.get("container-image")) is not None and _plain(found)
    keys: dict[str, Any] = {"slurm.container_runtime": "pyxis"} if image else {}
    said, enters = [], ""
    for option in sorted(given.values(), key=lambda each: each.name == "container-workdir"):
        key, value, why = _KEYS.get(option.name, ""), option.value or "", ""
        mounts = [_absolute(each, directory) for each in value.split(",") if each]
        if not key:
            why = f"--{option.name} has no counterpart in a job file"
        elif not _plain(option):
            why = f"--{option.name} is known to the job's shell alone, or to be filled in: set {key}"
        elif not image:
            why = f"--{option.name} says nothing without an image: set slurm.container and {key}"
        elif option.name == "container-mounts" and not all(map(_MOUNT.fullmatch, mounts)):
            why = f"--{option.name}={value} names no absolute paths: set {key}"
        elif option.name == "container-mounts":
            keys[key] = tuple(mounts)
        elif option.name == "container-workdir" and not _as_outside(value, keys.get(_KEYS["container-mounts"], ())):
            key, enters = "program.command", value
        else:
            keys[key] = value
        said.append((option, "" if why else key, why))
    return StepContainer(keys, tuple(said), enters)


def _plain(option: Option) -> bool:
    return bool(option.value) and not re.search(f"[{_UNKNOWN}{BLANK}$`<>]", option.value or "")


def _absolute(mount: str, directory: str | None) -> str:
    source, colon, rest = mount.partition(":")
    if source.startswith(".") and directory is not None:
        return os.path.normpath(os.path.join(directory, source)) + colon + rest
    return mount


def _as_outside(path: str, mounts: Iterable[str]) -> bool:
    """Return True if a directory inside the container is the one of the same name outside."""
    for mount in mounts:
        source, _, target = mount.partition(":")
        target = target.partition(":")[0] or source
        if source == target and PurePosixPath(path).is_relative_to(target):
            return True
    return False


_MOUNT = re.compile(r"/[^:]*(:/[^:]*(:[\w+-]+)?)?")
_KEYS = {"container-image": "slurm.container", "container-mounts": "slurm.container_mounts",
         "container-workdir": "program.directory"}
