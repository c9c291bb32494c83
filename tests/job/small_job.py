"""A job file that is right and small, for tests that spoil it."""

from tables import table

JOB = table(__file__, "small_job.toml", "job")
