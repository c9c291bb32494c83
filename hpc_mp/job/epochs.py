"""Conversion of ``train.epochs`` to optimizer steps, once the number of tokens is known."""

import math

from hpc_mp.job.checks import check_arithmetic
from hpc_mp.job.spec import JobSpec

DIGITS = 6  # decimals to which a number of steps is rounded: 1.1 × 10 is 11 in spite of binary fractions


def samples_of(tokens: int, sequence_length: int) -> int:
    """Return the whole samples in that many tokens: ``sequence_length`` inputs each, plus one token for the very last label."""
    return max(0, tokens - 1) // sequence_length


def has_a_sample_per_row(spec: JobSpec) -> bool:
    return spec.data.prompt_length is not None or bool(spec.data.labels)


def samples_in(spec: JobSpec, tokens: int, rows: int) -> int:
    """Return the samples of a job in files of so many tokens and rows."""
    return rows if has_a_sample_per_row(spec) else samples_of(tokens, spec.data.sequence_length)


def steps_of(epochs: float, samples: int, global_batch: int) -> int:
    """Return the number of steps, rounded up, that train on each of ``samples`` ``epochs`` times."""
    return max(1, math.ceil(round(epochs * samples / global_batch, DIGITS)))


def with_steps(spec: JobSpec, samples: int) -> JobSpec:
    """Return the job with ``train.steps`` in place of ``train.epochs``; unchanged if it already has steps. ``samples``: those of
    all its files. Raises HpcMpError if the resulting number of steps is invalid."""
    if spec.train.epochs is None:
        return spec
    steps = steps_of(spec.train.epochs, samples, spec.train.global_batch)
    counted = spec.model_copy(update={"train": spec.train.model_copy(update={"steps": steps, "epochs": None})})
    check_arithmetic(counted)
    return counted
