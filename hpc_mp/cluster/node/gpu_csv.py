"""nvidia-smi's answers in CSV: quick, one row per GPU or program, for what is asked often or under load."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass

from hpc_mp.cluster.node.gpu_smi import address
from hpc_mp.cluster.node.source import Source, Unseen

_LOAD = ("index", "pci.bus_id", "clocks.current.sm", "clocks.max.sm", "clocks.current.memory", "power.draw", "temperature.gpu",
         "utilization.gpu", "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # from driver 535.54.03 on; before it


@dataclass(frozen=True)
class Load:
    """One GPU at this moment. Each number is None where the driver does not tell.

    Attributes:
        clock, max_clock, memory_clock: MHz.
        power: W.
        temperature: degrees C.
        busy: % of the last moments.
        pcie: (generation now, greatest, lanes now, greatest).
        reasons: why it does not run faster: a bit mask.
    """

    index: int
    bus: str
    clock: float | None
    max_clock: float | None
    memory_clock: float | None
    power: float | None
    temperature: float | None
    busy: float | None
    pcie: tuple[float | None, float | None, float | None, float | None]
    reasons: int | None


def query(source: Source, what: str, fields: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """``nvidia-smi --query-WHAT``: rows of field to text. Raises Unseen."""
    answer = source.answer(("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"))
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):
            yield dict(zip(fields, cells, strict=True))


def read_load(source: Source) -> tuple[Load, ...]:
    """What each GPU does now. Raises Unseen."""
    try:
        return tuple(_load(row, _REASONS[0]) for row in query(source, "gpu", (*_LOAD, _REASONS[0])))
    except Unseen:  # an older driver refuses the whole question for a field that it does not know
        return tuple(_load(row, _REASONS[1]) for row in query(source, "gpu", (*_LOAD, _REASONS[1])))


def number(text: str) -> float | None:
    """None for "[N/A]" and the like."""
    found = re.fullmatch(r"-?\d+(?:\.\d+)?", text)
    return float(text) if found else None


def _load(row: Mapping[str, str], reasons: str) -> Load:
    values = {name: number(text) for name, text in row.items()}
    mask = row[reasons]
    return Load(
        index=int(row["index"]),
        bus=address(row["pci.bus_id"]),
        clock=values["clocks.current.sm"],
        max_clock=values["clocks.max.sm"],
        memory_clock=values["clocks.current.memory"],
        power=values["power.draw"],
        temperature=values["temperature.gpu"],
        busy=values["utilization.gpu"],
        pcie=(values["pcie.link.gen.current"], values["pcie.link.gen.max"],
              values["pcie.link.width.current"], values["pcie.link.width.max"]),
        reasons=int(mask, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", mask) else None,
    )
