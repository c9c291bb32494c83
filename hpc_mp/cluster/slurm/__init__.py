"""Slurm: the only package that runs Slurm's programs and parses their output."""
