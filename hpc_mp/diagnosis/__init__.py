"""Diagnosis of a failed attempt: the log lines, tracebacks, stacks, waits and records that it left, and the one root cause.

``texts`` maps a text to a kind of failure. ``tracebacks``, ``watchdogs``, ``stacks`` and ``ends`` read the output of a rank.
``waits`` finds the rank that all others waited for. ``lines`` reads srun, slurmstepd and the kernel. ``cause`` judges only by
the records of ranks, ``classify`` by all ``evidence``.
"""
