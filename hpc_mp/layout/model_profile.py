"""A measured profile of a model's units: a file that ``hpc-mp train JOB --profile`` writes and a partition reads.

It contains seconds and bytes of the embedding, a block of each kind, and the last norm with the head, for one microbatch on a
whole device (with neither tensor nor context ranks), and the settings of the job that they depend on. A profile of anything else
is refused.
"""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any

from pydantic import Field, NonNegativeInt, TypeAdapter, ValidationError

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json, write_json
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape

REMEDY = "measure on a node of the job: hpc-mp train JOB.toml --profile"


@dataclass(frozen=True, slots=True)
class UnitProfile:
    """The profile of one unit."""

    seconds: Annotated[float, Field(ge=0, allow_inf_nan=False)]  # forward and backward of a microbatch
    activations: NonNegativeInt  # bytes that its backward needs of its forward
    parameters: NonNegativeInt  # bytes in the compute format
    spread: float = 0.0  # interquartile range of the seconds over the repetitions, relative to their median

    @property
    def bytes(self) -> int:
        return self.activations + self.parameters


@dataclass(frozen=True, slots=True)
class ModelProfile:
    """The profile of all units."""

    device: str  # its model, or "cpu"
    repetitions: int  # number of repetitions; the seconds are medians over them
    measured: dict[str, Any]  # settings that the measurement depends on, by name
    embedding: UnitProfile
    blocks: tuple[UnitProfile, ...]  # a block of each of the model's ``kinds``
    head: UnitProfile
    memory: int | None = None  # bytes that the device has for a rank; None if unknown (a file of an earlier release)

    @property
    def spread(self) -> float:
        """The largest spread of a unit."""
        return max(unit.spread for unit in (self.embedding, *self.blocks, self.head))


def conditions(layout: Layout, shape: ModelShape, documents: str, dropout: float | None) -> dict[str, Any]:
    """Return the settings that measured seconds and bytes depend on, without the number of layers."""
    sizes = asdict(shape)
    sizes.pop("family", None)  # of a model that was read
    sizes = json.loads(json.dumps(sizes))  # with lists for tuples, as the profile is read
    sizes["dense"] = sorted(shape.dense)
    del sizes["layers"], sizes["initializer_range"]
    return {**sizes, "sequences of a microbatch": layout.samples, "sequence_length": layout.sequence, "documents": documents,
            "precision": layout.precision, "recompute": layout.recompute, "dropout": dropout,
            "expert_capacity": layout.expert_capacity}


def write_profile(path: Path, profile: ModelProfile) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    write_json(path, asdict(profile))


def read_profile(path: Path, current: Mapping[str, Any]) -> ModelProfile:
    """Return a profile that was measured under the current ``conditions``. Raises HpcMpError if the file does not exist, is not a
    profile, or is a profile of something else."""
    value = f"the profile {path}"
    try:
        tree = read_json(path)
    except OSError as error:
        raise HpcMpError(value, f"cannot be read ({error.strerror}), but parallel.partition = \"profile\" needs it",
                         REMEDY) from None
    except (ValueError, RecursionError) as error:
        raise HpcMpError(value, f"is not JSON ({error})", REMEDY) from None
    try:
        profile = TypeAdapter(ModelProfile).validate_python(tree)
    except ValidationError as error:
        raise HpcMpError(value, f"is not what --profile writes ({error.error_count()} wrong or missing keys)", REMEDY) from None
    for name in sorted(current.keys() | profile.measured.keys()):
        if (measured := profile.measured.get(name)) != (required := current.get(name)):
            raise HpcMpError(value, f"was measured with {name} = {measured}, but the job has {required}", REMEDY)
    return profile
