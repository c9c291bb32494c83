"""Facts about machines, without torch: one node, Slurm, switches, measured bandwidth, bad nodes."""
