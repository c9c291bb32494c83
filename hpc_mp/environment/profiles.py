"""Profiles: what the variables of a platform should be, with reasons. One file each, ``env/profiles/NAME.toml``."""

from __future__ import annotations

import functools
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.environment.facts import facts
from hpc_mp.environment.versions import GUARD, Library

FOLDER = "env/profiles"
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
Guard = Annotated[str, StringConstraints(pattern=rf"^{GUARD.pattern}(,{GUARD.pattern})*$")]

# What the use of a variable means:
#   image     the platform's own image says so in /etc/nccl.conf; a container does not see that file
#   job       every job wants it
#   optional  some jobs want it: the reason says which
#   bench     for the makers' benchmarks; a training is better off without it
#   leave     must not be set
Use = Literal["image", "job", "optional", "bench", "leave"]
APPLIED: tuple[Use, ...] = ("image", "job")


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Variable(Part):
    """One variable, or one of several values that it may have.

    Attributes:
        value: literal, except that with ``expands`` ``$SLURM_JOB_ID`` and the like are replaced.
        finds: the value is found on the machine: ``route``, the interface of the default route, exactly; ``infiniband``, the
            devices in InfiniBand mode, exactly, on machines that have others too.
        joins: a list with this between its members, in front of which the value goes.
        needs: releases of libraries that it is for, as ``{ nccl = ">=2.21" }``.
    """

    name: Name
    value: Line = ""
    use: Use = "job"
    reason: Text
    source: Text
    needs: dict[Library, Guard] = {}
    finds: Literal["route", "infiniband"] | None = None
    expands: bool = False
    joins: Text | None = None

    @model_validator(mode="after")
    def _found_or_given(self) -> Variable:
        if self.value and (self.finds or self.use == "leave"):
            raise ValueError(f"{self.name} has a value and should not")
        return self


class MakerScript(Part):
    """A maker's own script, read by bash before the variables; the first of ``files`` that is there."""

    files: Annotated[list[Text], Field(min_length=1)]
    given: dict[Name, Line] = {}
    reason: Text
    source: Text


class Detect(Part):
    """By what a machine of no type in the catalogue is known; all that is given must hold.

    Attributes:
        rank: profiles are tried in this order: the special before the general.
        vendor: of the firmware; a regular expression, from the beginning.
        gpus: every GPU, as ``nvidia 0x2330``; a regular expression.
        least_gpus: how many at least.
        layer: a link layer of an RDMA port.
        efa, cxi: Amazon's adapters, HPE Slingshot's.
    """

    rank: int
    vendor: Text | None = None
    gpus: Text | None = None
    least_gpus: int = 0
    layer: Literal["InfiniBand", "Ethernet"] | None = None
    efa: bool = False
    cxi: bool = False


class Profile(Part):
    """A platform.

    Attributes:
        name: of its file.
        cloud: whose network it is, by the table of clouds in ``env/harmful-variables.toml``; None for all others.
        requires: releases without which it does not work well.
        notes: what no variable says.
        detect: None for one that rows of the catalogue of machines name, or that is chosen by its name only.
    """

    name: str
    title: Text
    cloud: Text | None = None
    requires: dict[Library, Guard] = {}
    notes: list[Text] = []
    detect: Detect | None = None
    script: list[MakerScript] = []
    variable: list[Variable] = []

    @model_validator(mode="after")
    def _one_value_each(self) -> Profile:
        applied = [each.name for each in self.variable if each.use in (*APPLIED, "leave") and not each.needs]
        twice = {name for name in applied if applied.count(name) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: several values for every job")
        if self.cloud is not None and self.cloud not in facts().clouds:
            raise ValueError(f"{self.cloud} is none of {', '.join(facts().clouds)}")
        return self


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in asset(FOLDER).glob("*.toml")))


def load_profile(name: str) -> Profile:
    """Raises HpcMpError: there is none of that name, or its file is wrong."""
    if name not in profile_names():
        raise HpcMpError(f"profile {name!r}", f"is none of {', '.join(profile_names())}",
                         did_you_mean(name, profile_names(), "choose one of these"))
    return _read(asset(FOLDER) / f"{name}.toml")


@functools.cache
def load_profiles() -> tuple[Profile, ...]:
    return tuple(map(load_profile, profile_names()))


def _read(path: Path) -> Profile:
    try:
        return Profile.model_validate({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except (OSError, ValueError) as error:
        said = "; ".join(f"{'.'.join(map(str, one['loc']))}: {one['msg']}" for one in error.errors()) \
            if isinstance(error, ValidationError) else str(error)
        raise HpcMpError(f"profile {path}", f"cannot be read ({said})", "mend it") from None
