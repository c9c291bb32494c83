"""Nodes as Slurm sees them: states, addresses, and CPUs usable by jobs."""

import re
import socket
from collections.abc import Collection
from dataclasses import dataclass

from hpc_mp.base.command import Runner, ask
from hpc_mp.cluster.slurm.jobs import time_of
from hpc_mp.cluster.slurm.nodelist import compress
from hpc_mp.cluster.slurm.records import find_record

_OUT_OF_SERVICE = re.compile(r"\bdown|drain|drng|fail|maint|unk|inval|future|\$", re.IGNORECASE)
# sinfo's marks (its man page, "NODE STATE CODES"): $ in a reservation for maintenance, * silent, ~ off, # powering up,
# ! and % powering down, @ and ^ booting. Two marks do not prevent a step: - planned for another job, + a job of it is ending.
_ASLEEP = re.compile(r"power|reboot|[*~#!%@^]", re.IGNORECASE)


@dataclass(frozen=True, slots=True)
class NodeState:
    """``state`` is in sinfo's format (``idle``, ``down*``); ``reason`` is the administrator's, empty without one."""

    state: str
    reason: str = ""

    @property
    def in_service(self) -> bool:
        """True if Slurm can give this node to a job, possibly after powering it up."""
        return not _OUT_OF_SERVICE.search(self.state)

    @property
    def ready(self) -> bool:
        """True if a step can start there now."""
        return self.in_service and not _ASLEEP.search(self.state)


def node_states(nodes: Collection[str] = (), partition: str | None = None, ask: Runner = ask) -> dict[str, NodeState]:
    """Return the states of these nodes, else of a partition's nodes, else of all; by name. Raises CommandFailed if Slurm does not
    report them."""
    chosen = [*([f"--nodes={compress(nodes)}"] if nodes else []), *([f"--partition={partition}"] if partition else [])]
    lines = ask(("sinfo", "--noheader", "--Node", "--format=%N|%T|%E", *chosen)).splitlines()
    rows = (line.split("|", 2) for line in lines if line.count("|") >= 2)
    return {name: NodeState(state, "" if reason == "none" else reason) for name, state, reason in rows}


def unresponsive_nodes(nodes: Collection[str], ask: Runner = ask) -> tuple[str, ...]:
    """Return the nodes that are down, or whose daemons do not answer (Slurm marks them with a star). Raises CommandFailed if
    Slurm does not report them."""
    states = node_states(nodes, ask=ask)
    return tuple(name for name, state in states.items() if state.state.startswith("down") or state.state.endswith("*"))


def daemon_start(node: str, ask: Runner = ask) -> float | None:
    """Return the unix seconds at which a node's slurmd started, at the node's boot or later; None if unknown."""
    return time_of(find_record("node", node, ask).get("SlurmdStartTime", ""))


def usable_cpus(node: str, ask: Runner = ask) -> int | None:
    """Return the CPUs of a node that jobs may use: ``CPUEfctv``, without cores reserved for the system; None if unknown."""
    record = find_record("node", node, ask)
    count = record.get("CPUEfctv") or record.get("CPUTot")
    return int(count) if count else None


def address_of(node: str, ask: Runner = ask) -> str:
    """Return a resolvable name of ``node``: Slurm's node name may not resolve, its NodeAddr does."""
    try:
        socket.getaddrinfo(node, None)
    except OSError:
        return find_record("node", node, ask).get("NodeAddr") or node
    return node
