"""A real Slurm cluster of several hosts on one machine, for tests."""
