"""The switches between a job's hosts, from the first source that knows them.

Some sites refuse ``scontrol show topology`` on their nodes, and Slurm's own files may be unreadable there. The daemon of every
node still knows its own place, and passes it to the tasks that it starts.
"""

import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.allocation import one_task_environment
from hpc_mp.cluster.slurm.records import SHOW_TOPOLOGY, show_topology
from hpc_mp.cluster.slurm.steps import one_task_per_node
from hpc_mp.cluster.topology import SwitchTree, from_addresses, load_topology, read_topology

FILES = ("topology.yaml", "topology.conf")  # if the first exists, Slurm ignores the second (25.05)
FOLDER = Path("/etc/slurm")
PATTERN = "SLURM_TOPOLOGY_ADDR_PATTERN"
FLAT = "node"  # the pattern without switches
STEP_S = 30.0  # seconds for a step that prints one line per node, on many nodes
SAY_ADDRESS = f'echo "$SLURMD_NODENAME" "$SLURM_TOPOLOGY_ADDR" "${PATTERN}"'


def in_a_step(argv: Sequence[str]) -> str:
    """Return the output of the tasks of a step. Raises CommandFailed."""
    return ask(argv, STEP_S, one_task_environment(os.environ))


def switches(hosts: Sequence[str], srun: Sequence[str], ask: Runner = ask, run: Runner = in_a_step,
             environ: Mapping[str, str] = os.environ, folder: Path = FOLDER) -> tuple[SwitchTree, str]:
    """Return the tree of switches above ``hosts``, and its source; an empty tree if no source knows it. ``srun``: the ranks'
    command, adapted to query the nodes; if empty, nodes are not queried. ``ask``: runs scontrol. ``run``: runs a step.
    ``folder``: directory of Slurm's files, unless they are next to the file in ``SLURM_CONF``."""
    try:
        return read_topology(show_topology(ask)), SHOW_TOPOLOGY[0]
    except (CommandFailed, HpcMpError):  # refused on this node, or an unknown format
        pass
    beside = Path(environ["SLURM_CONF"]).parent if "SLURM_CONF" in environ else folder
    for path in (where / name for where in dict.fromkeys((beside, folder)) for name in FILES):
        with suppress(HpcMpError):
            if _knows(tree := load_topology(path), hosts):
                return tree, str(path)
    tree = SwitchTree() if environ.get(PATTERN) == FLAT else _of_nodes(hosts, srun, run)
    return (tree, "the nodes") if _knows(tree, hosts) else (SwitchTree(), "nobody")


def _of_nodes(hosts: Sequence[str], srun: Sequence[str], run: Runner) -> SwitchTree:
    step = one_task_per_node(srun, len(hosts), ["sh", "-c", SAY_ADDRESS]) if srun and len(hosts) > 1 else None
    if step is None:
        return SwitchTree()
    try:
        lines = (line.split() for line in run(step).splitlines())  # a site's prolog may print other lines
        return from_addresses((words[1], words[2]) for words in lines if len(words) == 3 and words[0] in hosts)
    except (CommandFailed, HpcMpError):
        return SwitchTree()


def _knows(tree: SwitchTree, hosts: Sequence[str]) -> bool:
    return any(map(tree.leaf, hosts))
