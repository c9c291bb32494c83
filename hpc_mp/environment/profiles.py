"""Profiles: the recommended variables of a platform, with reasons. One file each, ``env/profiles/NAME.toml``."""

import functools
import tomllib
from pathlib import Path
from typing import Annotated, Literal

from pydantic import BaseModel, ConfigDict, Field, StringConstraints, ValidationError, model_validator

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.environment.facts import facts
from hpc_mp.environment.versions import Library

FOLDER = "env/profiles"
Line = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]*$")]
Text = Annotated[str, StringConstraints(pattern=r"^[^\x00-\x1f\x7f]+$")]
Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z_][A-Za-z0-9_]*$")]
_GUARD = r"\s*(>=|<=|<|>)\s*\d+(\.\d+)*\s*"
Guard = Annotated[str, StringConstraints(pattern=rf"^{_GUARD}(,{_GUARD})*$")]

# The use of a variable:
#   image     the platform's own image sets it in /etc/nccl.conf; a container does not see that file
#   job       useful for every job
#   optional  useful for some jobs, which the reason names
#   bench     for the vendors' benchmarks; training is better without it
#   leave     must not be set
Use = Literal["image", "job", "optional", "bench", "leave"]
APPLIED: tuple[Use, ...] = ("image", "job")


class Part(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, strict=True)


class Variable(Part):
    """One variable, or one of its several possible values."""

    name: Name
    value: Line = ""  # the literal value; with ``expands``, ``$SLURM_JOB_ID`` and the like are replaced
    use: Use = "job"
    reason: Text
    source: Text
    needs: dict[Library, Guard] = {}  # the releases of libraries that it needs, as ``{ nccl = ">=2.21" }``
    # the kind of value determined on the machine: ``route``, the interface of the default route, exactly; ``infiniband``, the
    # devices in InfiniBand mode, exactly, on machines that have others too
    finds: Literal["route", "infiniband"] | None = None
    expands: bool = False
    joins: Text | None = None  # the separator of a list variable, in front of which the value is put

    @model_validator(mode="after")
    def _found_or_given(self) -> "Variable":
        if self.value and (self.finds or self.use == "leave"):
            raise ValueError(f"{self.name} must not have a value")
        return self


class MakerScript(Part):
    """A vendor's script, sourced by bash before the variables: the first of ``files`` that exists."""

    files: Annotated[list[Text], Field(min_length=1)]
    given: dict[Name, Line] = {}
    reason: Text
    source: Text


class Detect(Part):
    """Criteria that identify a machine whose type is not in the catalogue. All given criteria must hold."""

    rank: int  # the order in which profiles are tried, the specific before the general
    vendor: Text | None = None  # the firmware's vendor; a regular expression, matched from the beginning
    gpus: Text | None = None  # a regular expression for every GPU, as ``nvidia 0x2330``
    least_gpus: int = 0  # the minimum number of GPUs
    layer: Literal["InfiniBand", "Ethernet"] | None = None  # a link layer of an RDMA port
    # efa, cxi: adapters of Amazon, of HPE Slingshot
    efa: bool = False
    cxi: bool = False


class Profile(Part):
    """A platform."""

    name: str  # the name of its file
    title: Text
    # the owner of its network, from the table of clouds in ``env/harmful-variables.toml``; None for all others
    cloud: Text | None = None
    requires: dict[Library, Guard] = {}  # releases without which it does not work well
    notes: list[Text] = []  # remarks that belong to no variable
    detect: Detect | None = None  # None if rows of the machine catalogue name the profile, or if it is only chosen by name
    script: list[MakerScript] = []
    variable: list[Variable] = []

    @model_validator(mode="after")
    def _one_value_each(self) -> "Profile":
        applied = [variable.name for variable in self.variable if variable.use in (*APPLIED, "leave") and not variable.needs]
        twice = {name for name in applied if applied.count(name) > 1}
        if twice:
            raise ValueError(f"{', '.join(sorted(twice))}: several values for every job")
        if self.cloud is not None and self.cloud not in facts().clouds:
            raise ValueError(f"{self.cloud} is not one of {', '.join(facts().clouds)}")
        return self


def profile_names() -> tuple[str, ...]:
    return tuple(sorted(path.stem for path in asset(FOLDER).glob("*.toml")))


def load_profile(name: str) -> Profile:
    """Read the profile of that name. Raises HpcMpError if it does not exist or its file is invalid."""
    if name not in profile_names():
        raise HpcMpError(f"profile {name!r}", f"is not one of {', '.join(profile_names())}",
                         did_you_mean(name, profile_names(), "choose one of these"))
    return _read(asset(FOLDER) / f"{name}.toml")


@functools.cache
def load_profiles() -> tuple[Profile, ...]:
    return tuple(map(load_profile, profile_names()))


def _read(path: Path) -> Profile:
    try:
        return Profile.model_validate({"name": path.stem, **tomllib.loads(path.read_text(encoding="utf-8"))})
    except (OSError, ValueError) as error:
        details = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in error.errors()) \
            if isinstance(error, ValidationError) else str(error)
        raise HpcMpError(f"profile {path}", f"cannot be read ({details})", "correct it") from None
