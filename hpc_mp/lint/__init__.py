"""Linters for the user's sbatch scripts and Slurm configurations, with rules as tables."""
