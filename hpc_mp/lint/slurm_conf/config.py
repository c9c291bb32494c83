"""The output of ``scontrol`` about a cluster, as tables of words."""

import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bandwidth import LinkRates, noted
from hpc_mp.cluster.slurm.conf_file import ConfigLine, first_pairs, read_beside
from hpc_mp.cluster.slurm.records import Words, show_config, show_records, show_topology
from hpc_mp.cluster.topology import SwitchTree, Topology, read_topologies
from hpc_mp.cluster.topology.model import chosen


@dataclass(frozen=True, slots=True)
class SlurmFacts:
    """The known facts about a cluster. A value that Slurm leaves blank is an empty string."""

    config: Words  # the main section of ``scontrol show config``
    cgroup: Words | None = None  # its section on cgroups, else cgroup.conf; None if neither is available
    # partitions, nodes: one table each
    partitions: tuple[Words, ...] = ()
    nodes: tuple[Words, ...] = ()
    topologies: tuple[Topology, ...] | None = None  # the topologies; None if Slurm did not report any
    gres_conf: str | None = None  # the text of gres.conf, if it can be read
    measured: LinkRates | None = None  # the link rates between its nodes, measured by the doctor
    unseen: tuple[str, ...] = ()  # queries that failed, with the reason

    def says(self, key: str) -> str:
        return self.config.get(key, "")

    def shown(self, key: str) -> str:
        """Return a setting as the subject of a finding."""
        return f"{key}={self.says(key) or '(none)'}"

    def seconds(self, key: str) -> int | None:
        """Return the number of seconds in ``30 sec``; None if Slurm does not report it."""
        match = re.match(r"\d+", self.says(key))
        return int(match[0]) if match else None

    def listed(self, key: str) -> tuple[str, ...]:
        """Return the words of ``a,b``, in lower case."""
        return tuple(word.lower() for word in self.says(key).split(",") if word)

    @property
    def release(self) -> tuple[int, int] | None:
        match = re.match(r"(\d+)\.(\d+)", self.says("SLURM_VERSION"))
        return (int(match[1]), int(match[2])) if match else None

    @property
    def gpu_nodes(self) -> tuple[Words, ...]:
        return tuple(node for node in self.nodes if "gpu" in node.get("Gres", ""))

    @property
    def tree(self) -> SwitchTree:
        try:
            return chosen(self.topologies or ()).tree
        except HpcMpError:  # Slurm ensures a sound topology; the topology command reports faults
            return SwitchTree()


def ask_slurm(ask: Runner = ask) -> SlurmFacts:
    """Query a cluster through Slurm. Raises CommandFailed if Slurm does not show its configuration."""
    settings = show_config(ask)
    unseen: list[str] = []

    def records(what: Literal["node", "partition"]) -> tuple[Words, ...]:
        try:
            return show_records(what, ask=ask)
        except CommandFailed as error:
            unseen.append(f"{what}s: {str(error).splitlines()[-1]}")
            return ()

    partitions, nodes = records("partition"), records("node")
    topologies: tuple[Topology, ...] | None = None
    try:
        topologies = read_topologies(show_topology(ask))
    except (CommandFailed, HpcMpError) as error:
        unseen.append(f"topology: {str(error).splitlines()[-1]}")
    folder = Path(settings.config.get("SLURM_CONF") or "/etc/slurm/slurm.conf").parent
    cgroup = next((words for name, words in settings.sections.items() if name.lower().startswith("cgroup")), None)
    if cgroup is None and (lines := read_beside(folder / "cgroup.conf")) is not None:
        cgroup = first_pairs(lines)
    return SlurmFacts(settings.config, cgroup, partitions, nodes, topologies, text_of(read_beside(folder / "gres.conf")),
                      noted(settings.config.get("ClusterName")), tuple(unseen))


def text_of(lines: Sequence[ConfigLine] | None) -> str | None:
    """Return the text of a file and its includes; None if the file does not exist."""
    return None if lines is None else "\n".join(line.text for line in lines)


def number(record: Words, key: str) -> int | None:
    """Return a record's field as a number; None if it is not a number (UNLIMITED)."""
    value = record.get(key, "")
    return int(value) if value.isdecimal() else None
