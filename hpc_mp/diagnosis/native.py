"""Classification of the output of programs, where native libraries and daemons write in words of their own."""

from __future__ import annotations

import re

from hpc_mp.diagnosis.texts import kind_of

# (kind, pattern) of lines of native libraries and daemons. They are tried before ``texts``: an errno in them has another meaning.
# Sources: slurmstepd's cgroup plugins; UCX' ib_mlx5_log.c and ucp; the plugins of MPICH and AWS for libfabric; libibverbs, where
# lack of memory is the limit on locked memory; ROCm's runtime; huggingface_hub's downloads.
NATIVE: tuple[tuple[str | None, re.Pattern[str]], ...] = tuple((kind, re.compile(text)) for kind, text in (
    (None, r"slurmstepd\S*: error: .*(/sys/fs/cgroup|\bx?cgroup\w*_\w+: )"),  # a complaint about itself, often harmless
    ("unfit", r"slurmstepd\S*: error: .*exiting abnormally"),
    ("network", r"(Transport|RNR) retry (count|counter) exceeded|(Local|Remote) [\w ]+ error on \w+:\d|"
                r"\buc[pst]_\w+(\([^)]*\))? failed|ucx function returned with failed status"),
    ("network", r"OFI poll failed|\bOFI \w+ failed|NET/OFI .*(completed with error|\bRC: ?\d)|\bfi_cq_readerr\b"),
    ("network", r"\bibv_(exp_)?(reg_\w*mr|create_(cq|qp|srq))\w*(\([^)]*\))? failed"),
    ("network", r"Consistency check failed: file should be of size"),
    ("hardware", r"HW Exception by GPU|Driver/library version mismatch"),
))


def kind_in_output(text: str) -> str | None:
    """Return the kind of failure that a program's output reports; None for output without one."""
    native = next(((kind,) for kind, pattern in NATIVE if pattern.search(text)), None)
    return kind_of(text) if native is None else native[0]
