"""The program on a job's first node: it prepares, starts, watches and diagnoses the ranks, and decides what follows.

``python -m hpc_mp.supervisor RUN -- srun … COMMAND`` starts the ranks, follows them to their end, reports it, and requeues the
job if that helps. Ranks themselves never talk to Slurm. This package does not import torch.
"""
