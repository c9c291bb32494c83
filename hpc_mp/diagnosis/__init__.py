"""Diagnosis of a failed attempt: its log lines, tracebacks, stacks, waits and records, and the one root cause.

``texts`` maps a text to a kind of failure, ``native`` those of libraries and daemons. ``tracebacks``, ``watchdogs``, ``stacks``
and ``ends`` read the output of a rank. ``waits`` finds the rank that all others waited for. ``lines`` reads srun, slurmstepd and
the kernel. ``cause`` judges by the records of ranks only, ``classify`` by all ``evidence``.
"""
