"""What one device did."""

from __future__ import annotations

import json
from collections.abc import Iterable, Mapping
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Self


@dataclass(frozen=True, slots=True)
class Result:
    """One device's part of the measurement.

    Attributes:
        host, device: "n3"; "cuda:5" or "cpu".
        kind: what is compared with each other: the model of the device and how much of it there was.
        software: what computes; results are compared bit for bit among equal kinds with equal software.
        rates: "matmul bf16" and so on in TFLOP/s, "memory", "host to device", "device to host", "to peer" in GB/s.
        slowest: of the same, the slowest piece of the run as part of the median piece.
        wrong: problems whose exact answer is known and was missed.
        unsteady: problems whose answer was not the same every time.
        digests: of the answers to the same problems, which must be equal among equals; by problem, on CPUs by core ("core 3").
        share: part of the processors' time that it got under load; less than all where others compute too, or a cgroup limits it.
            None for a GPU.
        loaded: what nvidia-smi said of this GPU under load: "clock", "max clock" (MHz), "pcie", "max pcie" (generation), "lanes",
            "max lanes", "temperature" (degrees C), "power" (W), "reasons" (bit mask). Empty where it said nothing.
        error: why there is no more than that; empty when all is done.
    """

    host: str
    device: str
    kind: str = ""
    software: str = ""
    rates: Mapping[str, float] = field(default_factory=dict)
    slowest: Mapping[str, float] = field(default_factory=dict)
    wrong: tuple[str, ...] = ()
    unsteady: tuple[str, ...] = ()
    digests: Mapping[str, str] = field(default_factory=dict)
    share: float | None = None
    loaded: Mapping[str, float] = field(default_factory=dict)
    error: str = ""

    @classmethod
    def read(cls, document: Mapping[str, Any]) -> Self:
        """From the fields as JSON has them. Raises KeyError or TypeError for anything else."""
        return cls(**{**document, "wrong": tuple(document["wrong"]), "unsteady": tuple(document["unsteady"])})

    def __str__(self) -> str:
        return f"{self.host} {self.device}"


def write_results(results: Iterable[Result]) -> str:
    """As one JSON document."""
    return json.dumps({"results": [asdict(result) for result in results]}, indent=1)


def read_results(text: str | Path) -> tuple[Result, ...]:
    """What ``write_results`` wrote. Raises ValueError, KeyError or TypeError for anything else."""
    document = json.loads(text.read_text(encoding="utf-8") if isinstance(text, Path) else text)
    return tuple(map(Result.read, document["results"]))
