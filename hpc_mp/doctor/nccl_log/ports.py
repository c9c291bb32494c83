"""Comparison of the bytes through the ports of the fast network with the bytes that the ranks sent. The log states NCCL's
intention, the counters its actual traffic."""

from collections.abc import Iterator, Mapping

from hpc_mp.base.findings import Finding
from hpc_mp.base.text import data_size
from hpc_mp.cluster.node.rdma import read_fabric
from hpc_mp.cluster.node.source import NodeSource, maybe

WORD = 4  # InfiniBand counts port data in words of four bytes (IB specification, PortXmitData)
LEAST = 0.8  # fraction of the bytes that must have gone through the ports
UNEVEN = 0.5  # fraction of the median below which a port carried too little


def read_port_bytes(source: NodeSource) -> dict[str, int]:
    """Return the bytes that each port has sent since its counters were reset, by port name, "mlx5_0 port 1". Ports without
    counters, as of some virtual functions, are left out."""
    counters = {}
    fabric = read_fabric(source)
    for port in fabric.ports:
        base = f"/sys/class/infiniband/{port.device}/ports/{port.number}"
        if fabric.adapter(port).efa:
            sends, *of_rdma = (maybe(source.number, f"{base}/hw_counters/{name}")
                               for name in ("tx_bytes", "rdma_write_bytes", "rdma_read_resp_bytes"))
            if sends is not None:  # some drivers include RDMA in it
                counters[port.name] = max(sends, sum(filter(None, of_rdma)))
        elif (words := maybe(source.number, f"{base}/counters/port_xmit_data")) is not None:
            counters[port.name] = WORD * words
    return counters


def judge_ports(before: Mapping[str, int], after: Mapping[str, int], sent: int) -> Iterator[Finding]:
    """Compare two readings of a node around a run with the bytes that its ranks ``sent`` to other nodes in between."""
    moved = {port: after[port] - before[port] for port in after if port in before}
    if not moved or sent <= 0:
        yield Finding("nccl-ports", "unknown", "", "no counter of a fast port to compare with" if sent > 0
                      else "nothing was sent", "run as a user who may read /sys/class/infiniband/*/ports/*/counters, on the host")
        return
    if any(count < 0 for count in moved.values()):
        yield Finding("nccl-ports", "unknown", "", "the counters were reset during the run", "measure again")
        return
    total = sum(moved.values())
    evidence = f"{data_size(total)} went through the fast ports, the ranks sent {data_size(sent)}"
    if total < LEAST * sent:
        yield Finding("nccl-ports", "error", "", f"{evidence}: the rest took another way",
                      "see nccl-network; look at the counters of the Ethernet ports")
        return
    median = sorted(moved.values())[len(moved) // 2]
    idle = sorted(port for port, count in moved.items() if count < UNEVEN * median)
    for port in idle:
        yield Finding("nccl-ports", "warning", port, f"{data_size(moved[port])} sent, {data_size(median)} by the median port",
                      "look at this port's state and rate, and at the ring that NCCL built (nccl-nics)")
    if not idle:
        yield Finding("nccl-ports", "ok", "", f"{evidence}, evenly over {len(moved)} ports")
