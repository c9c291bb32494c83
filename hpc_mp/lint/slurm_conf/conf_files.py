"""slurm.conf and its companion files on disk, as a cluster: settings, nodes and partitions."""

from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path

from hpc_mp.cluster.slurm.conf_file import ConfigLine, conf_keys, first_pairs
from hpc_mp.cluster.slurm.nodelist import compress, expanded
from hpc_mp.cluster.slurm.records import Words
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.lint.slurm_conf.config import SlurmFacts, number, text_of

_SHOWN = {"1": "YES", "TRUE": "YES", "0": "NO", "FALSE": "NO"}  # values of a partition, as scontrol shows them
_WORDS = ("Default", "Hidden", "LLN", "OverSubscribe", "PreemptMode", "RootOnly", "State")
_ALSO = {"Procs": "CPUs", "Feature": "Features", "Shared": "OverSubscribe"}  # synonymous keys


@dataclass(frozen=True)
class ConfFiles:
    """The configuration files of a cluster."""

    path: Path  # the path of slurm.conf
    lines: tuple[ConfigLine, ...]  # the lines of slurm.conf and of the files that it includes
    # gres, cgroup: the lines of gres.conf and cgroup.conf beside it; None if the file does not exist
    gres: tuple[ConfigLine, ...] | None = None
    cgroup: tuple[ConfigLine, ...] | None = None
    release: Version | None = None  # the release of Slurm that reads the files; None for any

    @property
    def whole(self) -> bool:
        """True if the files are complete: no other slurm.conf includes this one, and all of its includes were read."""
        return not any(line.unread for line in self.lines) and (self.path.name == "slurm.conf" or "ClusterName" in self.settings)

    @cached_property
    def settings(self) -> Words:
        keys = conf_keys("setting")
        return {keys.get(key.casefold(), (key, ""))[0]: value for key, value in first_pairs(self.lines).items()}

    @cached_property
    def node_lines(self) -> tuple[tuple[ConfigLine, tuple[str, ...], Words], ...]:
        """The lines of nodes, the names in them, and their fields, with the fields of DEFAULT lines before them."""
        return tuple((line, expanded(fields["NodeName"]), fields) for line, fields in self._records("NodeName"))

    @cached_property
    def partition_lines(self) -> tuple[tuple[ConfigLine, Words], ...]:
        """The lines of partitions, likewise. ``Nodes`` names each node, even if the file has ALL or a node set."""
        everyone = {node: fields for _, nodes, fields in self.node_lines for node in nodes}
        sets = {fields["NodeSet"]: [*expanded(fields.get("Nodes", "")), *(
            node for node, values in everyone.items() if fields.get("Features") in values.get("Features", "").split(","))]
            for _, fields in self._records("NodeSet")}
        rows = []
        for line, fields in self._records("PartitionName"):
            named = everyone if fields.get("Nodes", "").upper() == "ALL" else expanded(fields.get("Nodes", ""))
            nodes = dict.fromkeys(node for name in named for node in ([name] if name in everyone else sets.get(name, [name])))
            shown = {key: _SHOWN.get(value.upper(), value.upper()) if key in _WORDS else value for key, value in fields.items()}
            rows.append((line, {**shown, "Nodes": compress(nodes), "TotalNodes": str(len(nodes))}))
        return tuple(rows)

    @cached_property
    def gres_lines(self) -> tuple[tuple[ConfigLine, Words, frozenset[str] | None], ...]:
        """The lines of gres.conf, their fields by lower-case key, and the nodes to which they apply; None for all."""
        return tuple((line, line.fields, frozenset(expanded(line.fields["nodename"])) if "nodename" in line.fields else None)
                     for line in self.gres or ())

    @property
    def facts(self) -> SlurmFacts:
        """The settings that ``scontrol`` would show for this cluster, as far as the files set them."""
        nodes = tuple({**fields, **({"CPUTot": str(processors(fields)[1])} if {"CPUs", "Sockets"} & fields.keys() else {}),
                       "NodeName": node} for _, names, fields in self.node_lines for node in names)
        return SlurmFacts(self.settings, None if self.cgroup is None else first_pairs(self.cgroup),
                          tuple(fields for _, fields in self.partition_lines), nodes, gres_conf=text_of(self.gres))

    def _records(self, kind: str) -> Iterator[tuple[ConfigLine, dict[str, str]]]:
        keys, default = conf_keys(kind), dict[str, str]()
        for line in self.lines:
            if line.pairs and line.pairs[0][0].casefold() == kind.casefold():
                pairs = [(keys.get(key.casefold(), (key, ""))[0], value) for key, value in line.pairs[1:]]
                fields = {_ALSO.get(key, key): value for key, value in pairs}
                if line.pairs[0][1].upper() == "DEFAULT" and kind != "NodeSet":
                    default |= fields
                else:
                    yield line, {**default, **fields, kind: line.pairs[0][1]}


def processors(fields: Words) -> tuple[frozenset[int], int]:
    """Return the numbers of processors that fit a node's sockets, cores and threads, and the number that Slurm uses. Source:
    _parse_nodename in src/common/read_config.c, releases 22.05 to 26.05."""
    cores, threads, boards = (number(fields, key) or 1 for key in ("CoresPerSocket", "ThreadsPerCore", "Boards"))
    cpus, per_board, sockets = (number(fields, key) for key in ("CPUs", "SocketsPerBoard", "Sockets"))
    if per_board is not None or sockets is None:
        inferred = cpus // (cores * threads) if cpus and cpus % (cores * threads) == 0 else boards
        sockets = inferred if per_board is None else boards * per_board
    fitting = frozenset({sockets, sockets * cores, sockets * cores * threads})
    return fitting, cpus if cpus in fitting else max(fitting)
