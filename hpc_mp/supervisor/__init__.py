"""The program on a job's first node: prepares, starts, watches and diagnoses the ranks, and decides what follows.

``python -m hpc_mp.supervisor RUN -- srun … COMMAND`` starts the ranks, follows them to their end, reports it, and has the job
requeued if that helps. Ranks themselves never talk to Slurm. No torch is imported here.
"""
