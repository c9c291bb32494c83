"""Reads Slurm's topology: topology.conf, topology.yaml (25.05), and what ``scontrol show topology`` prints."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import BaseModel, ValidationError

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.topology.model import Switch, SwitchTree, Topology, chosen

REMEDY = "give topology.conf, topology.yaml, or what `scontrol show topology` prints"
SHOWN = 200  # characters of a wrong text that its message repeats
NAMES = ("switchname", "blockname", "aggregatedblock", "ringname")  # keys that begin a line, in small letters
_PAIR = re.compile(r'\s*([\w.]+)\s*=\s*(?:"([^"]*)"|([^\s="]+))(?=\s|$)')  # as Slurm's parse_config.c has it
_INCLUDE = re.compile(r"\s*include\b", re.IGNORECASE)


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
    first = next((line for line in map(_without_comment, text.splitlines()) if line.strip() not in ("", "---")), None)
    if first is None:
        return ()
    found = (_read_lines(text),) if re.match(r"\s*\w+\s*=", first) or _INCLUDE.match(first) else _read_yaml(text)
    for topology in found:
        _refuse_repeats(switch.name for switch in topology.switches)
    return found


def _without_comment(line: str) -> str:
    return re.sub(r"(?<!\\)#.*", "", line)


def _refuse_repeats(names: Iterable[str]) -> None:
    """Slurm does not start with them, and the hosts of one of both would be lost."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise HpcMpError(f"{twice[0][:SHOWN]} in the topology", "is defined twice, with which Slurm does not start",
                         "give the second another name, or put the nodes of both into one")


# --- lines of KEY=VALUE: topology.conf and scontrol ------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Line:
    """``kind`` is one of ``NAMES`` or ``blocksizes``; host lists are expanded; ``sizes`` of BlockSizes or BlockSize."""

    kind: str
    switch: Switch
    sizes: tuple[int, ...]


def _read_lines(text: str) -> Topology:
    lines = [_line(number, line) for number, line in enumerate(_continued(text), 1) if line.strip()]
    of = {kind: tuple(line.switch for line in lines if line.kind == kind) for kind in NAMES}
    if of["switchname"] and of["blockname"]:
        raise HpcMpError("the topology", "names both switches and blocks, of which Slurm's plugins take one",
                         "take one of them out, or write a topology.yaml with two topologies")
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
    """Without comments, lines that end in a backslash joined to the next; as many as there are, so that numbers stay right."""
    held = ""
    for line in text.splitlines():
        held += _without_comment(line).rstrip()
        if held.endswith("\\"):
            held = held[:-1]
            yield ""
        else:
            yield held
            held = ""
    yield held


def _line(number: int, line: str) -> _Line:
    where = f"line {number} of the topology, {' '.join(line.split())[:SHOWN]!r}"
    if _INCLUDE.match(line):
        raise HpcMpError(where, "names another file, which is not read", "put that file's lines in its place")
    pairs = [(key.lower(), quoted or plain) for key, quoted, plain in _PAIR.findall(line)]
    rest = _PAIR.sub("", line).strip()
    kind, value = pairs[0] if pairs else ("", "")
    fields = dict(pairs)
    sizes_given = value if kind == "blocksizes" else fields.get("blocksize", "")
    sizes = tuple(int(size) for size in sizes_given.split(",") if size.isdecimal() and len(size) < 10)
    wrong = len(sizes) < len(sizes_given.split(",")) if sizes_given else kind == "blocksizes"
    if rest or not all(text for _, text in pairs) or wrong or kind not in (*NAMES, "blocksizes"):
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
    """https://slurm.schedmd.com/topology.yaml.html; torus3d and options of flat are read over: they have no switches."""

    topology: str
    cluster_default: bool = False
    tree: _Tree | None = None
    block: _Blocks | None = None
    ring: _Rings | None = None
    torus3d: Any = None
    flat: Any = None


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
    _refuse_repeats(each.topology for each in found)
    return tuple(map(_of_yaml, found))


def _of_yaml(found: _Topology) -> Topology:
    kinds = [kind for kind in ("tree", "block", "ring", "torus3d", "flat") if getattr(found, kind) is not None]
    if len(kinds) != 1:
        raise HpcMpError(f"topology {found.topology[:SHOWN]}", f"is {' and '.join(kinds) or 'of no kind'}, where Slurm wants one",
                         "give it one of tree, block, ring, torus3d and flat")
    known = Topology(found.topology, default=found.cluster_default)
    if found.block is not None:
        return replace(known, kind="block", sizes=tuple(found.block.block_sizes),
                       switches=tuple(Switch(each.block, expand(each.nodes)) for each in found.block.blocks))
    if found.ring is not None:
        return replace(known, kind="ring", switches=tuple(Switch(each.ring, expand(each.nodes)) for each in found.ring.rings))
    if found.tree is not None:
        return replace(known, kind="tree", switches=tuple(Switch(each.switch, expand(each.nodes), expand(each.children))
                                                          for each in found.tree.switches))
    if found.torus3d is not None:
        return replace(known, unread="torus3d")
    return replace(known, unread="options of flat") if isinstance(found.flat, dict) else known
