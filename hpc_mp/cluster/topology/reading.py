"""The result of reading a source about the switches between hosts."""

import re
from collections.abc import Iterable
from dataclasses import dataclass

from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.topology import Switch, Topology

LONGEST = 64
"""Maximum characters of a switch's name (topology.conf(5))."""


@dataclass(frozen=True, slots=True)
class TopologyReading:
    """The topologies of a source."""

    topologies: tuple[Topology, ...]  # usually one; none if the source shows none
    origin: str  # their source, as a phrase: "ibnetdiscover (fabric.txt)"
    notes: tuple[str, ...] = ()  # gaps of the source, or warnings before the topology is used; sentences


def natural(name: str) -> tuple[tuple[int | str, ...], ...]:
    """Return a key that sorts n2 before n10, however long the numbers are."""
    parts = (part.lstrip("0") if part.isdecimal() else part for part in re.split(r"(\d+)", name) if part)
    return tuple((0, len(part), part) if part.isdecimal() or not part else (1, part) for part in parts)


def listed(hosts: Iterable[str]) -> str:
    """Return a short host list in natural order."""
    return compress(sorted(hosts, key=natural))


def legal(name: str, taken: Iterable[str] = ()) -> str:
    """Return a name like ``name`` that Slurm accepts for a switch or block and that is not in ``taken``. Blanks, commas, brackets
    and the like would end the name or be read as a host list."""
    plain = re.sub(r"[^A-Za-z0-9._-]+", "-", name).strip("-")[:LONGEST] or "switch"
    if plain not in (used := set(taken)):
        return plain
    return next(other for number in range(2, len(used) + 3)
                if (other := f"{plain[: LONGEST - 1 - len(str(number))]}-{number}") not in used)


def group(name: str, hosts: Iterable[str]) -> Switch:
    """Return a leaf with its hosts in natural order, so that their list is short."""
    return Switch(name, tuple(sorted(dict.fromkeys(hosts), key=natural)))
