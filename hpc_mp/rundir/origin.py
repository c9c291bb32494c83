"""What a checkpoint says beside its tensors: how far training has come, and what it was trained as."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, fields
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json
from hpc_mp.layout.models.fields import CARRIED
from hpc_mp.rundir.layout import COUNTERS

# Fields of a transformers configuration that change nothing of what a causal language model computes in training.
NEUTRAL = CARRIED | {"_name_or_path", "initializer_range", "pretraining_tp"}

TAKE_WEIGHTS = "put that back; or `hpc-mp export` that run, and begin with its weights: model.pretrained"


@dataclass(frozen=True, slots=True)
class Origin:
    """What parameters and optimizer state come from, and in which order samples came.

    Attributes:
        model: the fields of its transformers configuration that count, defaults among them.
        optimizer: ``train.optimizer``.
        tokenizer: the SHA-256 of its tokenizer.json.
        data: the name of the token set, which stands for the text's content and its tokenizer.
        sequence_length, seed: with the token set they make the order of samples.
        documents: ``data.documents``; runs that began before there was a choice had them joined.
    """

    model: Mapping[str, Any]
    optimizer: str
    tokenizer: str
    data: str
    sequence_length: int
    seed: int
    documents: str = "joined"

    def same_samples(self, other: Origin) -> bool:
        """Whether both mean the same sample by its position."""
        return (self.data, self.sequence_length, self.seed) == (other.data, other.sequence_length, other.seed)


@dataclass(frozen=True, slots=True)
class Counters:
    """How far training has come.

    Attributes:
        step: optimizer steps; ``skipped``: how many of them changed nothing, because their gradient norm was not finite or none
            of their tokens counted; ``absorbed``: of these, how many do not count in ``train.skip_steps``: fp16's loss scale gave
            way for them, or no token counted.
        samples: the position of the next sample.
        tokens: that were trained on.
        loss_scale: the state of fp16's; empty: it has yet to begin.
    """

    step: int
    samples: int
    tokens: int
    origin: Origin
    skipped: int = 0
    absorbed: int = 0
    loss_scale: Sequence[float] = ()


@dataclass(frozen=True, slots=True)
class OriginDifference:
    """The first thing in which what is to be trained differs from what a checkpoint was trained as."""

    what: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"was trained with {self.what} = {self.before!r}, and this job has {self.now!r}"


def model_fields(configuration: Mapping[str, Any], dropouts: tuple[str, ...]) -> dict[str, Any]:
    """What counts of a transformers configuration (``to_dict``). Probabilities of dropout may change as training goes on."""
    counting = {key: value for key, value in configuration.items() if key not in NEUTRAL and key not in dropouts}
    found: dict[str, Any] = json.loads(json.dumps(counting, sort_keys=True, default=str))
    return found


def first_difference(before: Origin, now: Mapping[str, Any]) -> OriginDifference | None:
    """Of the parts of an origin given in ``now``. Fields of a model that only one release of transformers knows do not count."""
    for part in (field.name for field in fields(Origin) if field.name in now):
        was, has = getattr(before, part), now[part]
        if part != "model":
            if was != has:
                return OriginDifference(part, was, has)
            continue
        for key in sorted(was.keys() & has.keys()):
            if was[key] != has[key]:
                return OriginDifference(f"model.{key}", was[key], has[key])
    return None


def check_resumable(value: str, counters: Counters, now: Mapping[str, Any], steps: int) -> None:
    """Another run's checkpoint can be gone on with by a job that is ``now`` and trains up to ``steps``.

    Args:
        value: the key of the job file that names the run, with its value.
        now: parts of an origin, as far as they are known.

    Raises:
        HpcMpError: it cannot.
    """
    if difference := first_difference(counters.origin, now):
        raise HpcMpError(value, str(difference),
                         TAKE_WEIGHTS)
    if counters.step >= steps:
        raise HpcMpError(f"train.steps = {steps}", f"leaves nothing to do: {value} has done {counters.step} steps, which count",
                         f"set train.steps to more than {counters.step}")


def counters_of(checkpoint: Path) -> Counters:
    """Those of a complete checkpoint. Raises HpcMpError when another release wrote something else."""
    try:
        document = read_json(checkpoint / COUNTERS)
        return Counters(**document | {"origin": Origin(**document["origin"])})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise HpcMpError(f"checkpoint {checkpoint}", f"its {COUNTERS} cannot be read ({type(error).__name__}: {error})",
                         "export it with the release that saved it, and begin with its weights: model.pretrained") from None


def counters_document(counters: Counters) -> dict[str, Any]:
    """As ``counters_of`` reads it."""
    return asdict(counters)
