"""The measurement result of one device."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Result:
    """The measurement result of one device."""

    host: str
    device: str  # "cuda:5" or "cpu"
    kind: str = ""  # model and size of the device; devices of equal kind are compared
    software: str = ""  # library and version; results are compared bit for bit among equal kinds with equal software
    # "matmul bf16" and so on in TFLOP/s, "memory", "host to device", "device to host", "to peer" in GB/s
    rates: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()  # problems with a known exact answer that the device got wrong
    unsteady: tuple[str, ...] = ()  # problems whose answer was not the same every time
    # digests of the answers, which must be equal on equal devices; by problem, on CPUs by core ("core 3")
    digests: Mapping[str, str] = field(default_factory=dict)
    # fraction of the processors' time that it got under load; below 1 if other programs compute too, or a cgroup limits it;
    # None for a GPU
    share: float | None = None
    # nvidia-smi's report of this GPU under load: "clock", "max clock" (MHz), "pcie", "max pcie" (generation), "lanes", "max
    # lanes", "temperature" (degrees C), "power" (W), "reasons" (bit mask). Empty if nvidia-smi gave no answer.
    loaded: Mapping[str, float] = field(default_factory=dict)
    error: str = ""  # reason why the measurement is incomplete; empty if it is complete

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """Build a result from the fields of a JSON object. Raises KeyError or TypeError for anything else."""
        return cls(**{**document, "wrong": tuple(document["wrong"]), "unsteady": tuple(document["unsteady"])})

    def __str__(self) -> str:
        return f"{self.host} {self.device}"
