"""The time that a job asks for, in seconds, and how long before its end the ranks save."""

from __future__ import annotations

from hpc_mp.job.spec import JobSpec


def limit_seconds(text: str) -> int | None:
    """A time as Slurm writes it (``"90"`` minutes, ``"1:30:00"``, ``"1-12"``) in seconds; None for 0, which is no limit."""
    days, dash, clock = text.rpartition("-")
    fields = [int(field) for field in clock.split(":")]
    if dash:
        hours, minutes, seconds = [*fields, 0, 0][:3]
    elif len(fields) == 3:
        hours, minutes, seconds = fields
    else:
        hours, (minutes, seconds) = 0, [*fields, 0][:2]
    return (int(days or 0) * 24 + hours) * 3600 + minutes * 60 + seconds or None


def grace(spec: JobSpec) -> int:
    """Seconds before the time limit at which ranks save and stop: ``slurm.grace``, at most a quarter of the limit."""
    limit = limit_seconds(spec.job.time_limit)
    return spec.slurm.grace if limit is None else max(1, min(spec.slurm.grace, limit // 4))
