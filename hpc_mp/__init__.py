"""hpc-mp: train Hugging Face models too big for one GPU on a Slurm cluster."""

import importlib
from typing import Any

__version__ = "0.1.0"
__all__ = ["CutPoint", "HpcMpError", "LayerSpec", "RunFailed", "__version__", "log", "parallel", "run_job", "submit"]

# Imported when they are first asked for, so that ``import hpc_mp`` costs nothing.
LAZY = {"log": "hpc_mp.program.log", "run_job": "hpc_mp.launch.launch", "submit": "hpc_mp.launch.submit.api",
        "parallel": "hpc_mp.train.own_loop.parallel", "CutPoint": "hpc_mp.train.model.cut_points",
        "LayerSpec": "hpc_mp.train.model.layer_list", "HpcMpError": "hpc_mp.base.errors", "RunFailed": "hpc_mp.base.errors"}


def __getattr__(name: str) -> Any:
    """``hpc_mp.run_job`` starts a job file or a ``JobSpec``, ``hpc_mp.submit`` a Python callable; a program that was started says
    with ``hpc_mp.log`` how far it is. ``hpc_mp.parallel`` divides a model over the ranks of such a program."""
    if name in LAZY:
        return getattr(importlib.import_module(LAZY[name]), name)
    raise AttributeError(f"module 'hpc_mp' has no attribute {name!r}")


def __dir__() -> list[str]:
    return sorted({*globals(), *LAZY})
