"""Slurm's topology as text: readers of topology.conf, topology.yaml (25.05) and the output of ``scontrol show topology``, and
writers of both files. Blocks are for Slurm 24.05 and later: 23.11 has the plug-in, and refuses BlockSizes."""

import re
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import yaml
from pydantic import TypeAdapter, ValidationError, create_model

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.slurm.conf_file import ConfigLine, conf_table, read_conf
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.topology.model import Kind, Switch, SwitchTree, Topology, chosen, legal, only, unsound

REMEDY = "pass topology.conf, topology.yaml, or the output of `scontrol show topology`"
SHOWN = 200  # characters of a malformed text that the message repeats
NAMES = ("switchname", "blockname", "aggregatedblock", "ringname")  # keys that begin a line, in lower case


def load_topology(path: Path) -> SwitchTree:
    """Read a file. Raises HpcMpError if it cannot be read or is not a topology."""
    try:
        return chosen(read_topologies(path.read_text(encoding="utf-8-sig"), path)).tree
    except OSError as error:
        raise HpcMpError(f"topology {path}", f"cannot be read ({error.strerror})", REMEDY) from None
    except UnicodeDecodeError:
        raise HpcMpError(f"topology {path}", "is not UTF-8 text", REMEDY) from None


def read_topology(text: str) -> SwitchTree:
    """Return the switches of a topology in any of the three forms: the default one, else the first. Empty text: nothing is known.
    Raises HpcMpError with the malformed line."""
    return chosen(read_topologies(text)).tree


def read_topologies(text: str, file: Path | None = None) -> tuple[Topology, ...]:
    """Return the topologies of a text in any of the three forms: several in topology.yaml, one elsewhere, none in empty text.
    Raises HpcMpError with the malformed line. ``file``: the text's file, relative to which included files are found; None: a line
    that includes one is refused."""
    lines = [line for line in read_conf(text, file) if line.text.strip() != "---"]
    if not lines:
        return ()
    topologies = (_of_lines(lines),) if lines[0].unread or re.match(r"\s*\w+\s*=", lines[0].text) else _read_yaml(text)
    for topology in topologies:
        _refuse_repeats(switch.name for switch in topology.switches)
    return topologies


def _refuse_repeats(names: Iterable[str]) -> None:
    """Refuse repeated names: Slurm does not start with them, and the hosts of one of both would be lost."""
    twice = [name for name, count in Counter(names).items() if count > 1]
    if twice:
        raise HpcMpError(f"{twice[0][:SHOWN]} in the topology", "is defined twice: Slurm would not start",
                         "rename the second, or put the nodes of both into one")


# --- lines of KEY=VALUE: topology.conf and scontrol ------------------------------------------------------------------


def _of_lines(text: Iterable[ConfigLine]) -> Topology:
    lines = list(map(_line, text))
    of = {name: tuple(switch for kind, switch, _ in lines if kind == name) for name in NAMES}
    if of["switchname"] and of["blockname"]:
        raise HpcMpError("the topology", "names both switches and blocks, but a plugin of Slurm takes only one",
                         "take one of them out, or write a topology.yaml with two topologies")
    if of["blockname"] or of["aggregatedblock"]:
        sizes = tuple(dict.fromkeys(size for _, _, line_sizes in lines for size in line_sizes))
        return Topology(kind="block", switches=of["blockname"], sizes=sizes, joined=of["aggregatedblock"], default=True)
    if of["switchname"]:
        return Topology(kind="tree", switches=_without_repeats((*of["switchname"], *of["ringname"])), default=True)
    if of["ringname"]:
        return Topology(kind="ring", switches=of["ringname"], default=True)
    raise HpcMpError("the topology", "names neither switches nor blocks", REMEDY)


def _without_repeats(switches: Sequence[Switch]) -> tuple[Switch, ...]:
    """Remove the hosts that scontrol repeats at higher switches."""
    at_leaves = {host for switch in switches if not switch.children for host in switch.hosts}
    return tuple(replace(switch, hosts=tuple(host for host in switch.hosts if not switch.children or host not in at_leaves))
                 for switch in switches)


def _line(line: ConfigLine) -> tuple[str, Switch, tuple[int, ...]]:
    """Return one of ``NAMES`` or ``blocksizes``, the switch with its hosts, and the sizes of BlockSizes or BlockSize."""
    where = f"line {line.number} of the topology, {' '.join(line.text.split())[:SHOWN]!r}"
    if line.unread:
        raise HpcMpError(where, "names another file, which is not read", "replace it with the lines of that file")
    fields = line.fields
    kind, value = next(iter(fields.items()), ("", ""))
    sizes_given = value if kind == "blocksizes" else fields.get("blocksize", "")
    sizes = tuple(int(size) for size in sizes_given.split(",") if size.isdecimal() and len(size) < 10)
    wrong = len(sizes) < len(sizes_given.split(",")) if sizes_given else kind == "blocksizes"
    unlike = line.rest or not all(value and "=" not in value for value in fields.values())
    if unlike or wrong or kind not in (*NAMES, "blocksizes"):
        raise HpcMpError(where, "must have the form KEY=VALUE …, beginning with SwitchName, BlockName, RingName or BlockSizes",
                         REMEDY)
    keys = {key.casefold(): key for several in conf_table("topology").values() for key in several}
    if strange := [key for key, _ in line.pairs[1:] if key.casefold() not in keys]:
        raise HpcMpError(where, f"has the key {strange[0]}, which Slurm does not know",
                         did_you_mean(strange[0], keys.values(), f"write one of {', '.join(keys.values())}"))
    try:
        children = expand(value) if kind == "aggregatedblock" else expand(fields.get("switches", ""))
        return kind, Switch(value, expand(fields.get("nodes", "")), children), sizes
    except HpcMpError as error:
        raise HpcMpError(where, f"{error.value} {error.rule}", error.remedy) from None


# --- topology.yaml ---------------------------------------------------------------------------------------------------


# The list of a kind's switches, the key of their names, and their further keys: True if required.
_LISTS: dict[Kind, tuple[str, str, dict[str, bool]]] = {
    "tree": ("switches", "switch", {"children": False, "nodes": False}),
    "block": ("blocks", "block", {"nodes": False}),
    "ring": ("rings", "ring", {"nodes": True}),
}
_KINDS = (*_LISTS, "torus3d", "flat")


def _form(kind: Kind) -> Any:
    switches, name, further = _LISTS[kind]
    keys: dict[str, Any] = {name: (str, ...), **{key: (str, ... if required else "") for key, required in further.items()}}
    lists: dict[str, Any] = {switches: (list[create_model(name, **keys)], ...)}  # type: ignore[misc]
    if kind == "block":
        lists["block_sizes"] = (list[int], [])
    return create_model(kind, **lists)


# https://slurm.schedmd.com/topology.yaml.html; torus3d and options of flat are ignored: they have no switches.
_ENTRY: Any = create_model("Entry", topology=(str, ...), cluster_default=(bool, False), torus3d=(Any, None), flat=(Any, None),
                           **{kind: (_form(kind) | None, None) for kind in _LISTS})  # type: ignore[call-overload]
_FILE = TypeAdapter[Any](list[_ENTRY])


def _read_yaml(text: str) -> tuple[Topology, ...]:
    try:
        tree: Any = yaml.load(text, Loader=yaml.BaseLoader)  # texts, lists and tables only: nothing is constructed
        entries = [entry.model_dump() for entry in _FILE.validate_python(tree)]
    except yaml.MarkedYAMLError as error:
        line = f"line {error.problem_mark.line + 1} of the topology" if error.problem_mark else "the topology"
        raise HpcMpError(line, f"is not valid YAML ({str(error.problem)[:SHOWN]})", REMEDY) from None
    except (yaml.YAMLError, RecursionError):
        raise HpcMpError("the topology", "is not valid YAML", REMEDY) from None
    except ValidationError as error:
        first = error.errors()[0]
        place = ".".join(map(str, first["loc"])) or "the whole"
        raise HpcMpError(f"the topology, {place}", f"is not valid in topology.yaml ({first['msg']})", REMEDY) from None
    _refuse_repeats(entry["topology"] for entry in entries)
    return tuple(map(_of_yaml, entries))


def _of_yaml(entry: Mapping[str, Any]) -> Topology:
    kinds = [kind for kind in _KINDS if entry[kind] is not None]
    if len(kinds) != 1:
        raise HpcMpError(f"topology {entry['topology'][:SHOWN]}",
                         f"is {' and '.join(kinds) or 'of no kind'}, but Slurm needs one", f"set one of {', '.join(_KINDS)}")
    topology = Topology(entry["topology"], default=entry["cluster_default"])
    for kind, (switches, name, _) in _LISTS.items():
        if part := entry[kind]:
            return replace(topology, kind=kind, sizes=tuple(part.get("block_sizes", ())), switches=tuple(
                Switch(row[name], expand(row["nodes"]), expand(row.get("children", ""))) for row in part[switches]))
    unread = "torus3d" if entry["torus3d"] is not None else "options of flat" if isinstance(entry["flat"], dict) else ""
    return replace(topology, unread=unread)


def to_conf(topology: Topology, header: Sequence[str] = ()) -> str:
    """Return topology.conf of a tree or of blocks. Names are changed if Slurm would not accept them. Switches of a tree with no
    nodes below them are left out, because Slurm before 25.05 does not start with them. Blocks without ``BlockSizes`` get the size
    of the smallest one. Raises HpcMpError if the topology knows no host, or has sizes that Slurm refuses."""
    writable = _writable(topology)
    if writable.kind == "block":
        lines = [f"BlockName={block.name}" + (f" Nodes={compress(block.hosts)}" if block.hosts else "")
                 for block in writable.switches]
        lines.append(f"BlockSizes={','.join(map(str, writable.sizes))}")
    else:
        lines = [f"SwitchName={switch.name}" + (f" Switches={compress(switch.children)}" if switch.children else "")
                 + (f" Nodes={compress(switch.hosts)}" if switch.hosts else "") for switch in writable.switches]
    return "".join(f"{line}\n" for line in (*_comments(header), *lines))


def to_yaml(topologies: Sequence[Topology], header: Sequence[str] = ()) -> str:
    """Return topology.yaml with one or several topologies. Raises HpcMpError if two have the same name, or one cannot be written.
    """
    names = [topology.name for topology in topologies]
    if len(set(names)) < len(names):
        raise HpcMpError(f"topologies {', '.join(names)}", "two have the same name", "rename one: partitions refer to names")
    entries = [_entry(_writable(topology) if topology.kind != "flat" or topology.unread else topology) for topology in topologies]
    text = yaml.safe_dump(entries, sort_keys=False, default_flow_style=False, width=1_000_000)
    return "".join(f"{line}\n" for line in _comments(header)) + text


def _entry(topology: Topology) -> dict[str, Any]:
    entry: dict[str, Any] = {"topology": topology.name, "cluster_default": topology.default}
    if topology.kind == "block":
        blocks = [{"block": block.name} | ({"nodes": compress(block.hosts)} if block.hosts else {})
                  for block in topology.switches]
        return entry | {"block": {"block_sizes": list(topology.sizes), "blocks": blocks}}
    if topology.kind == "ring":
        return entry | {"ring": {"rings": [{"ring": ring.name, "nodes": compress(ring.hosts)} for ring in topology.switches]}}
    if topology.kind == "flat":
        return entry | {"flat": True}
    return entry | {"tree": {"switches": [
        {"switch": switch.name} | ({"children": compress(switch.children)} if switch.children else {})
        | ({"nodes": compress(switch.hosts)} if switch.hosts else {}) for switch in topology.switches]}}


def _comments(header: Iterable[str]) -> list[str]:
    """Return the header as comments. A line that ended in a backslash would continue in the next, which Slurm would then skip."""
    return [f"# {line}".rstrip("\\") for text in header for line in text.splitlines()]


def _writable(topology: Topology) -> Topology:
    """Return the topology as Slurm accepts it, with legal names. Raises HpcMpError."""
    if topology.unread:
        raise HpcMpError(f"topology {topology.name}", f"has {topology.unread}, which is not read and would be lost",
                         "remove that topology from the source, and add it to the result by hand")
    if not topology.hosts:
        raise HpcMpError("the topology", "has no node under any switch", "use another source, or other --nodes")
    if topology.kind == "block":
        sizes = topology.sizes or (min(len(block.hosts) for block in topology.switches if block.hosts),)
        if (wrong := unsound(sizes)) is not None:
            raise HpcMpError(f"BlockSizes={','.join(map(str, sizes))}", f"{wrong} is not a power of two times {sizes[0]}",
                             "write for example 4,8,16")
        topology = replace(topology, sizes=sizes)
    elif topology.kind == "tree":
        topology = only(topology, topology.hosts)
    names: dict[str, str] = {}
    for switch in topology.switches:
        names[switch.name] = legal(switch.name, names.values())
    written: list[Switch] = []
    for switch in topology.switches:
        name, children = names[switch.name], tuple(names[child] for child in switch.children if child in names)
        if children and switch.hosts:  # Slurm accepts switches or nodes: its own nodes get a leaf below it
            leaf = legal(f"{name}-nodes", names.values())
            names[f"{switch.name} nodes"] = leaf
            written += [Switch(leaf, switch.hosts), Switch(name, (), (*children, leaf))]
        else:
            written.append(Switch(name, switch.hosts, children))
    return replace(topology, joined=(), switches=tuple(written))
