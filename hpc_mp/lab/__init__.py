"""A cluster on a laptop: a real Slurm of several hosts on this machine, each host in namespaces of its own."""
