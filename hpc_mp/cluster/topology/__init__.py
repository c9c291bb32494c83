"""The switches between hosts: read from many sources and checked; and an order of hosts that keeps neighbours together."""

from hpc_mp.cluster.topology.host_order import crossings, order_hosts
from hpc_mp.cluster.topology.model import Switch, SwitchTree, Topology, from_addresses
from hpc_mp.cluster.topology.slurm_text import load_topology, read_topologies, read_topology

__all__ = ["Switch", "SwitchTree", "Topology", "crossings", "from_addresses", "load_topology", "order_hosts", "read_topologies",
           "read_topology"]
