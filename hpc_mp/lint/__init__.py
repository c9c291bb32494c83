"""Findings in what others wrote: sbatch scripts and Slurm configurations."""
