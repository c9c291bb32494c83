"""The state of a checkpoint besides its tensors: the training progress, and the origin of the parameters."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field, fields, replace
from pathlib import Path
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.files import read_json
from hpc_mp.layout.models.adapters import Adapters
from hpc_mp.layout.models.fields import CARRIED
from hpc_mp.rundir.layout import COUNTERS

# Fields of a transformers configuration that do not affect what a causal language model computes in training.
NEUTRAL = CARRIED | {"_name_or_path", "initializer_range", "pretraining_tp"}

LORA = "lora"  # null: all weights are trained, as in runs from before adapters
TAKE_WEIGHTS = "restore that value, or `hpc-mp export` that run and start from its weights (model.pretrained)"


@dataclass(frozen=True, slots=True)
class Origin:
    """The origin of parameters and optimizer state, and of the order of samples.

    Attributes:
        model: relevant fields of the transformers configuration, defaults among them, and ``adapter_fields``.
        optimizer: value of ``train.optimizer``.
        tokenizer: SHA-256 of its tokenizer.json.
        data: name of the token set, which identifies the text's content and its tokenizer.
        sequence_length, seed: with the token set they determine the order of samples.
        prompt_length: value of ``data.prompt_length``, by which samples are cut.
        documents: value of ``data.documents``; "joined" for runs from before this key existed.
        weights: value of ``data.weights``, by which a mixture's samples are ordered too.
    """

    model: Mapping[str, Any]
    optimizer: str
    tokenizer: str
    data: str
    sequence_length: int
    seed: int
    documents: str = "joined"
    weights: Sequence[float] = field(default_factory=list)
    prompt_length: int | None = None

    def same_samples(self, other: "Origin") -> bool:
        """Return True if a position denotes the same sample in both."""
        return ((self.data, self.sequence_length, self.seed, self.weights, self.prompt_length)
                == (other.data, other.sequence_length, other.seed, other.weights, other.prompt_length))


@dataclass(frozen=True, slots=True)
class Counters:
    """The progress of training.

    Attributes:
        step: optimizer steps done; ``skipped``: the steps among them that changed nothing, because their gradient norm was not
            finite or none of their tokens counted; ``absorbed``: the skipped steps that do not count in ``train.skip_steps``,
            because fp16's loss scale was lowered for them or no token counted.
        samples: the position of the next sample.
        tokens: number of tokens trained on.
        loss_scale: state of fp16's loss scale; empty before its start.
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
    """The first difference between the training to do and the origin of a checkpoint."""

    what: str
    before: Any
    now: Any

    def __str__(self) -> str:
        return f"was trained with {self.what} = {self.before!r}, but this job has {self.now!r}"


def adapter_fields(adapters: Adapters | None) -> dict[str, Any]:
    """Return what adapters add to the fields of a model. Their dropout may change."""
    fields = None if adapters is None else asdict(replace(adapters, dropout=0.0)) | {"modules": list(adapters.modules)}
    return {LORA: fields}


def model_fields(configuration: Mapping[str, Any], dropouts: tuple[str, ...]) -> dict[str, Any]:
    """Return the relevant fields of a transformers configuration (``to_dict``). Dropout probabilities may change."""
    counting = {key: value for key, value in configuration.items() if key not in NEUTRAL and key not in dropouts}
    relevant: dict[str, Any] = json.loads(json.dumps(counting, sort_keys=True, default=str))
    return relevant


def first_difference(before: Origin, now: Mapping[str, Any]) -> OriginDifference | None:
    """Return the first difference among the parts in ``now``. Model fields of one transformers release only do not count."""
    for part in (part.name for part in fields(Origin) if part.name in now):
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
    """Check that a job with origin ``now``, which trains up to ``steps``, can continue from another run's checkpoint. ``value``:
    the job file's key that names the run, with its value. ``now``: the known parts of an origin. Raises HpcMpError if it cannot
    continue."""
    if difference := first_difference(counters.origin, now):
        raise HpcMpError(value, str(difference), TAKE_WEIGHTS)
    if counters.step >= steps:
        raise HpcMpError(f"train.steps = {steps}", f"leaves nothing to do: {value} has already trained {counters.step} steps",
                         f"set train.steps to more than {counters.step}")


def counters_of(checkpoint: Path) -> Counters:
    """Read the counters of a complete checkpoint. Raises HpcMpError if another release wrote another format."""
    try:
        document = read_json(checkpoint / COUNTERS)
        origin = Origin(**document["origin"])
        return Counters(**document | {"origin": replace(origin, model={LORA: None, **origin.model})})
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise HpcMpError(f"checkpoint {checkpoint}", f"its {COUNTERS} cannot be read ({type(error).__name__}: {error})",
                         "export it with the release that saved it, and start from its weights (model.pretrained)") from None


def counters_document(counters: Counters) -> dict[str, Any]:
    """Return the document that ``counters_of`` reads."""
    return asdict(counters)
