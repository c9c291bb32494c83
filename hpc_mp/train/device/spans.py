"""Names for torch's profiler: a trace of a step shows phases, actions, layers and collectives under these names."""

from contextlib import AbstractContextManager, nullcontext

import torch
from torch.profiler import record_function


def profiled(name: str) -> AbstractContextManager[object]:
    """Name the block for the profiler if one is running. A name costs some microseconds."""
    return record_function(name) if torch.autograd._profiler_enabled() else nullcontext()
