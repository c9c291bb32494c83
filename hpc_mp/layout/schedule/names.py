"""The names of pipeline schedules and the sizes that they accept, and the prefix of partitions by module.

A schedule is a name in ``STAGES_PER_RANK`` or the path of a table, a file that ends in ``.csv``.
"""

from hpc_mp.base.errors import HpcMpError

STAGES_PER_RANK: dict[str, int | None] = {
    "gpipe": 1,
    "simple": 1,
    "1f1b": 1,
    "interleaved_1f1b": None,
    "breadth_first": None,
    "zero_bubble": 1,
    "zero_bubble_v": 2,
}
"""Name → number of stages on each rank; None: ``virtual_stages``."""

NAMES = ", ".join(STAGES_PER_RANK)
TABLE = ".csv"
AT = "at:"  # followed by a regular expression: a partition whose stages begin at the modules whose names match


def is_table(name: str) -> bool:
    """Return True if a schedule is a file and not a name."""
    return name.endswith(TABLE)


def is_schedule(name: str) -> bool:
    return name in STAGES_PER_RANK or is_table(name)


def stages_per_rank(name: str, virtual_stages: int) -> int:
    """Return the stages per rank. ``virtual_stages`` counts only if the schedule does not fix the number; 1 is its default."""
    return STAGES_PER_RANK.get(name) or virtual_stages


def check_sizes(name: str, pipeline: int, microbatches: int, virtual_stages: int, section: str = "") -> None:
    """Check the name and the sizes of a schedule. ``section``: the prefix of keys in messages, such as ``"parallel."``. Raises
    HpcMpError for an unknown name, a size below 1, or stages per rank or microbatches that the schedule does not accept."""
    if not is_schedule(name):
        raise HpcMpError(f"{section}schedule = {name!r}", "is not a schedule",
                         f"use one of {NAMES}, or a table whose name ends in {TABLE}")
    for key, value in (("pipeline", pipeline), ("microbatches", microbatches), ("virtual_stages", virtual_stages)):
        if value < 1:
            raise HpcMpError(f"{section}{key} = {value}", "must be at least 1", f"set {key} to 1 or more")
    fixed = STAGES_PER_RANK.get(name)
    if fixed is not None and virtual_stages not in (1, fixed):
        raise HpcMpError(f"{section}virtual_stages = {virtual_stages}",
                         f"{name} has {('one stage', 'two stages')[fixed - 1]} per rank",
                         "leave virtual_stages out, or use schedule interleaved_1f1b or breadth_first")
    if name == "interleaved_1f1b" and microbatches % pipeline:
        multiple = -(-microbatches // pipeline) * pipeline
        raise HpcMpError(f"{section}microbatches = {microbatches}",
                         f"interleaved_1f1b needs a multiple of pipeline({pipeline}); {microbatches} % {pipeline} = "
                         f"{microbatches % pipeline}", f"use {multiple} microbatches, or schedule breadth_first or 1f1b")
