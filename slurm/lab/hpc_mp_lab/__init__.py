"""A cluster on a laptop: a real Slurm with several hosts on this machine, each in separate namespaces."""
