"""The catalogue of machines: GPUs, sizes, links, NICs, peaks and leaf sizes, from ``env/machines`` and the files of users.

It is the source of machine figures for the doctor, the planner, the environment and the clouds. The packed health check has only
the standard library of Python 3.10, so the rows are JSON beside this file there.
"""

from functools import cache
from pathlib import Path

from hpc_mp.base.packed import packed_table
from hpc_mp.catalogue.machines import Catalogue, GpuModel, MachineType, Marks, build

__all__ = ["PACKED_ROWS", "Catalogue", "GpuModel", "MachineType", "Marks", "catalogue"]

PACKED_ROWS = "machines"  # only in the archive of the health check


def catalogue() -> Catalogue:
    """Return all rows: the shipped ones, the site's, the user's. Raises HpcMpError if a file of the site or the user is
    invalid."""
    if (rows := packed_table(PACKED_ROWS)) is not None:
        return build(**rows)
    from hpc_mp.catalogue.read import own_files  # the archive has no pydantic
    return _read(own_files())


@cache
def _read(own: tuple[Path, ...]) -> Catalogue:
    from hpc_mp.catalogue.read import read_rows
    return build(**read_rows(own))
