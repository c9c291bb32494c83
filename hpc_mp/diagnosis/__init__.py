"""Why an attempt of a run failed: the words, tracebacks, stacks, waits and records that are left of it, and the one cause.

``texts`` knows what kind of failure a text speaks of; ``tracebacks``, ``watchdogs``, ``stacks`` and ``ends`` read what a rank has
left; ``waits`` finds whom all others waited for; ``lines`` reads srun, slurmstepd and the kernel. ``cause`` judges by the records
of ranks alone, ``classify`` by all ``evidence``.
"""
