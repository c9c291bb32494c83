"""Facts about machines: host lists, what Slurm says, GPUs. No torch."""
