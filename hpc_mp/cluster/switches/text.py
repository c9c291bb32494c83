"""Reads Slurm's topology: topology.conf, topology.yaml (25.05), and what ``scontrol show topology`` prints."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hpc_mp.cluster.nodelist import expand
from hpc_mp.cluster.switches.model import Topology, chosen
from hpc_mp.cluster.switches.tree import Switch, SwitchTree
from hpc_mp.errors import HpcMpError

REMEDY = "give topology.conf, topology.yaml, or what `scontrol show topology` prints"
SHOWN = 200  # characters of a wrong text that its message repeats
NAMES = ("switchname", "blockname", "aggregatedblock", "ringname")  # keys that begin a line, in small letters


def load_topology(path: Path) -> SwitchTree:
    """Read a file. Raises HpcMpError when it cannot be read or is no topology."""
    try:
        return read_topology(path.read_text(encoding="utf-8-sig"))
    except OSError as error:
        raise HpcMpError(f"topology {path}", f"cannot be read ({error.strerror})", REMEDY) from None
    except UnicodeDecodeError:
        raise HpcMpError(f"topology {path}", "is not UTF-8 text", REMEDY) from None


def read_topology(text: str) -> SwitchTree:
    """The switches of a topology in any of the three forms: of the default one, else the first. Empty text: nothing is known.

    Raises:
        HpcMpError: with the line that cannot be understood.
    """
    return chosen(read_topologies(text)).tree


def read_topologies(text: str) -> tuple[Topology, ...]:
    """The topologies of a text in any of the three forms: several in topology.yaml, one elsewhere, none in empty text.

    Raises:
        HpcMpError: with the line that cannot be understood.
    """
    first = next((words for words in map(_words, text.splitlines()) if words not in ([], ["---"])), [])
    if not first:
        return ()
    return (_read_lines(text),) if "=" in first[0] else _read_yaml(text)


def _words(line: str) -> list[str]:
    return line.partition("#")[0].split()


# --- lines of KEY=VALUE: topology.conf and scontrol ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """``kind`` is one of ``NAMES`` or ``blocksizes``; host lists are expanded; ``sizes`` of BlockSizes or BlockSize."""

    kind: str
    switch: Switch
    sizes: tuple[int, ...]


def _read_lines(text: str) -> Topology:
    lines = [_line(number, words) for number, words in enumerate(map(_words, _continued(text)), 1) if words]
    of = {kind: tuple(line.switch for line in lines if line.kind == kind) for kind in NAMES}
    if of["blockname"] or of["aggregatedblock"]:
        sizes = tuple(dict.fromkeys(size for line in lines for size in line.sizes))
        return Topology(kind="block", switches=of["blockname"], sizes=sizes, joined=of["aggregatedblock"], default=True)
    if of["switchname"]:
        return Topology(kind="tree", switches=_without_repeats((*of["switchname"], *of["ringname"])), default=True)
    if of["ringname"]:
        return Topology(kind="ring", switches=of["ringname"], default=True)
    raise HpcMpError("the topology", "names neither switches nor blocks", REMEDY)


def _without_repeats(switches: Sequence[Switch]) -> tuple[Switch, ...]:
    """scontrol repeats at higher switches the hosts of those below."""
    at_leaves = {host for switch in switches if not switch.children for host in switch.hosts}
    return tuple(replace(switch, hosts=tuple(host for host in switch.hosts if not switch.children or host not in at_leaves))
                 for switch in switches)


def _continued(text: str) -> Iterator[str]:
    """Lines, with those that end in a backslash joined to the next; as many as there are, so that numbers stay right."""
    held = ""
    for line in text.splitlines():
        held += line
        if held.endswith("\\"):
            held = held[:-1] + " "
            yield ""
        else:
            yield held
            held = ""
    yield held


def _line(number: int, words: list[str]) -> _Line:
    where = f"line {number} of the topology, {' '.join(words)[:SHOWN]!r}"
    pairs = [word.partition("=") for word in words]
    keys = [key.lower() for key, _, _ in pairs]
    kind, value = keys[0], pairs[0][2]
    fields = {key: text for key, (_, _, text) in zip(keys, pairs, strict=True)}
    told = value if kind == "blocksizes" else fields.get("blocksize", "")
    sizes = tuple(int(size) for size in told.split(",") if size.isdecimal() and len(size) < 10)
    wrong = len(sizes) < len(told.split(",")) if told else kind == "blocksizes"
    if not all(text for _, _, text in pairs) or wrong or kind not in (*NAMES, "blocksizes"):
        raise HpcMpError(where, "does not read SwitchName=…, BlockName=…, RingName=… or BlockSizes=…", REMEDY)
    try:
        children = expand(value) if kind == "aggregatedblock" else expand(fields.get("switches", ""))
        return _Line(kind, Switch(value, expand(fields.get("nodes", "")), children), sizes)
    except HpcMpError as error:
        raise HpcMpError(where, f"{error.value} {error.rule}", error.remedy) from None


# --- topology.yaml ---------------------------------------------------------------------------------------------------


class _Switch(BaseModel):
    switch: str
    children: str = ""
    nodes: str = ""


class _Block(BaseModel):
    block: str
    nodes: str = ""


class _Ring(BaseModel):
    ring: str
    nodes: str


class _Tree(BaseModel):
    switches: list[_Switch]


class _Blocks(BaseModel):
    block_sizes: list[int] = []
    blocks: list[_Block]


class _Rings(BaseModel):
    rings: list[_Ring]


class _Topology(BaseModel):
    """https://slurm.schedmd.com/topology.yaml.html; torus3d is read over: it has no switches."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
    ring: _Rings | None = None


class _File(BaseModel):
    topologies: list[_Topology]


def _read_yaml(text: str) -> tuple[Topology, ...]:
    try:
        tree: Any = yaml.load(text, Loader=yaml.BaseLoader)  # texts, lists and tables only: nothing is constructed
        found = _File(topologies=tree).topologies
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1} of the topology" if error.problem_mark else "the topology"
        raise HpcMpError(line, f"is not valid YAML ({str(error.problem)[:SHOWN]})", REMEDY) from None
    except (yaml.YAMLError, RecursionError):
        raise HpcMpError("the topology", "is not valid YAML", REMEDY) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"][1:])) or "the whole"
        raise HpcMpError(f"the topology, {place}", f"is not as topology.yaml has it ({first['msg']})", REMEDY) from None
    return tuple(map(_of_yaml, found))


def _of_yaml(found: _Topology) -> Topology:
    known = Topology(found.topology, default=found.cluster_default)
    if found.block is not None:
        return replace(known, kind="block", sizes=tuple(found.block.block_sizes),
                       switches=tuple(Switch(each.block, expand(each.nodes)) for each in found.block.blocks))
    if found.ring is not None:
        return replace(known, kind="ring", switches=tuple(Switch(each.ring, expand(each.nodes)) for each in found.ring.rings))
    if found.tree is not None:
        return replace(known, kind="tree", switches=tuple(Switch(each.switch, expand(each.nodes), expand(each.children))
                                                          for each in found.tree.switches))
    return known
