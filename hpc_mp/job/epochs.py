"""``train.epochs`` in optimizer steps, once it is known how many tokens there are."""

from __future__ import annotations

import math

from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.spec import JobSpec

DIGITS = 6  # of a number of steps that count: 1.1 × 10 is 11, whatever binary fractions make of it


def samples_of(tokens: int, sequence_length: int) -> int:
    """Whole samples in so many tokens: each has ``sequence_length`` inputs, and the last one's last label comes on top."""
    return max(0, tokens - 1) // sequence_length


def steps_of(epochs: float, samples: int, global_batch: int) -> int:
    """The steps in which every one of ``samples`` is trained on ``epochs`` times: the last step is rounded up."""
    return max(1, math.ceil(round(epochs * samples / global_batch, DIGITS)))


def with_steps(spec: JobSpec, tokens: int) -> JobSpec:
    """The job with ``train.steps`` in place of ``train.epochs``; as it is if it says steps.

    Args:
        tokens: in all its files.

    Raises:
        HpcMpError: for what is wrong with that number of steps.
    """
    if spec.train.epochs is None:
        return spec
    steps = steps_of(spec.train.epochs, samples_of(tokens, spec.data.sequence_length), spec.train.global_batch)
    counted = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps, "epochs": None})})
    check_arithmetic(counted)
    return counted
