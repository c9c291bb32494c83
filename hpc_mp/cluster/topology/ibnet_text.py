"""The records that ``ibnetdiscover`` prints: switches and adapters, their names, and what hangs at their ports.

The form is in ibnetdiscover(8): a line ``Switch 36 "S-GUID" # "description" …`` or ``Ca 1 "H-GUID" # "description"``, then
a line per connected port, ``[1] "H-GUID"[1](PORTGUID) # "description" lid 4 4xHDR``.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError

_NODE = re.compile(r'(?P<kind>Switch|Ca|Rt)\s+\d+\s+"(?P<id>[SHR]-[0-9a-fA-F]+)"\s*(?:#\s*"(?P<name>[^"]*)")?')
_PORT = re.compile(r'\[\d+\](?:\[[^\]]*\])*(?:\([0-9a-fA-F]+\))?\s+"(?P<id>[SHR]-[0-9a-fA-F]+)"\s*\[\d+\]'
                   r'(?:\[[^\]]*\])*(?:\([0-9a-fA-F]+\))?\s*(?:#\s*"(?P<name>[^"]*)")?')
_ADAPTER = re.compile(r"(HCA-\d+|(mlx|hfi|qib|ib|bnxt|irdma|ionic|cxi|rdma)\w*|\w*mlx\w*)", re.IGNORECASE)
_HOST = re.compile(r"[A-Za-z0-9]([\w-]*[A-Za-z0-9])?")
_MAKER = re.compile(r"mellanox|voltaire|topspin|connectx|infinihost|aggregation node|^MT\d+|openib", re.IGNORECASE)
"""What stands for a name where nobody set one; ``Aggregation Node`` is a switch's own SHARP engine."""


@dataclass(frozen=True, slots=True)
class Fabric:
    """Attributes:
        links: switch → what hangs at it: switches and adapters, by identity ("S-…", "H-…").
        names: descriptions by identity.
    """

    links: Mapping[str, frozenset[str]]
    names: Mapping[str, str]


def looks_like(text: str) -> bool:
    return any(_NODE.match(line.strip()) for line in text.splitlines())


def read_fabric(text: str) -> Fabric:
    """Raises HpcMpError: no switch is in it."""
    links: dict[str, set[str]] = {}
    names: dict[str, str] = {}
    here = ""
    for line in map(str.strip, text.splitlines()):
        if found := _NODE.match(line):
            here = found["id"]
            if found["kind"] == "Switch":
                links.setdefault(here, set())
        elif here and (found := _PORT.match(line)):
            for one, other in ((here, found["id"]), (found["id"], here)):
                if one.startswith("S-"):
                    links.setdefault(one, set()).add(other)
        else:
            continue
        if found["name"]:
            names.setdefault(found["id"], found["name"])
    if not links:
        raise HpcMpError("the text", "names no InfiniBand switch", "give what `ibnetdiscover` prints, without options")
    return Fabric({switch: frozenset(ends) for switch, ends in links.items()}, names)


def host_of(description: str) -> str | None:
    """``node018`` of "node018 HCA-1", "node018/mlx5_0" and "node018.site.org mlx5_0".

    None where the description is the maker's own, or a name that every machine has before it gets one.
    """
    words = [word for word in re.split(r"[\s/:]+", description.strip().strip("'\"")) if word]
    if not words or _MAKER.search(description) or len(words) > 2 or (len(words) == 2 and not _ADAPTER.fullmatch(words[1])):
        return None
    name = words[0].partition(".")[0]
    return name if _HOST.fullmatch(name) and name != "localhost" else None


def switch_name(description: str) -> str | None:
    """``leaf01`` of "MF0;leaf01:MQM8700/U1" and of "leaf01"; None where the description is the maker's own."""
    managed = re.fullmatch(r"[^;]*;([^:;]+):.*", description.strip())
    name = managed[1] if managed else description.strip()
    return name if name and not _MAKER.search(name) else None
