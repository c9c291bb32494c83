"""Where a topology can be learnt, written down for Slurm, and checked against what was measured."""
