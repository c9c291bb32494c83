"""The import of transformers, and of the part of it that a model needs.

It takes as long as that of torch, so a rank is at the meeting without it. The import is over before the first step.
"""

import importlib

from hpc_mp.base.extras import need_train
from hpc_mp.base.garbage import uncollected
from hpc_mp.layout.models import Family
from hpc_mp.train.rank.logs import capture_transformers


def import_model_code(family: Family) -> None:
    """Import what ``assemble`` builds this family's models of. Raises HpcMpError if a library of the rank half is missing."""
    need_train("a rank")
    with uncollected():
        import hpc_mp.train.rank.assemble  # noqa: F401

        for module in family.modules:
            importlib.import_module(module)
    capture_transformers()
