"""The host: the program that a job script ends in, on the first node of a Slurm job and outside of any container.

``python -m hpc_mp.supervisor RUN -- srun … COMMAND`` starts the ranks, follows them to their end, says what it was, and
has the job queued again where that helps. Ranks themselves never talk to Slurm. No torch is imported here.
"""
