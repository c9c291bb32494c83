"""The program on a job's first node: prepares, starts, watches and diagnoses the ranks, and decides what follows.

``python -m hpc_mp.supervisor RUN -- srun … COMMAND`` starts the ranks, follows them to their end, says what it was, and
has the job queued again where that helps. Ranks themselves never talk to Slurm. No torch is imported here.
"""
