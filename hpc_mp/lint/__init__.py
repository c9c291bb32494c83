"""Findings in what others wrote: sbatch scripts and Slurm configurations, by rules as tables."""
