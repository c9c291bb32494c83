"""What an existing Slurm cluster is, and what of it is set up wrongly for training."""
