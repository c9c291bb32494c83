"""hpc-mp: train Hugging Face models too big for one GPU on a Slurm cluster."""

from __future__ import annotations

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["__version__", "submit"]


def __getattr__(name: str) -> Any:
    """``hpc_mp.submit``, imported when it is first asked for (see ``hpc_mp.launch.submit.api``)."""
    if name == "submit":
        return importlib.import_module("hpc_mp.launch.submit.api").submit
    raise AttributeError(f"module 'hpc_mp' has no attribute {name!r}")
