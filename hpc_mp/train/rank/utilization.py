"""The speed at which devices would compute a model at their peak, for its utilization of them (MFU)."""

import math

import torch

from hpc_mp.catalogue import catalogue
from hpc_mp.job import JobSpec
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.models.operations import training_operations
from hpc_mp.train.rank.devices import SHARED, device_name


def peak_speed(spec: JobSpec, shape: ModelShape, device: torch.device, backend: str) -> float:
    """Return the tokens per second of all ranks if their devices did nothing but the model's operations, at the dense peak of the
    precision; NaN on CPUs, on a GPU that ranks share, and if the catalogue knows no such peak."""
    gpu = catalogue().gpu(device_name(device)) if device.type == "cuda" and backend != SHARED else None
    peak = gpu.peak_tflops.get(spec.train.precision, math.nan) * 1e12 if gpu else math.nan
    return spec.ranks * peak / training_operations(shape, spec.data.sequence_length)
