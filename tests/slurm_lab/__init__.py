"""A real Slurm cluster of several hosts on one machine, for tests: `python -m tests.slurm_lab --help`."""
