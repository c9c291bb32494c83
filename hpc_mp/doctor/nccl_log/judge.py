"""Findings on NCCL's use of the machine's fast network, from a probe's log, kept logs, or the bytes through ports.

NCCL falls back silently, these findings report it. The log states NCCL's intention, the counters its actual traffic.
"""

import sys
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain
from pathlib import Path
from typing import Literal

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding, Severity
from hpc_mp.base.grouping import grouped
from hpc_mp.base.text import data_size, several
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.gpu_driver import has_gpus, read_models
from hpc_mp.cluster.node.gpu_pci import count_nvswitches
from hpc_mp.cluster.node.rdma import read_fabric
from hpc_mp.cluster.node.source import NodeSource, OwnProgram, Unavailable, maybe
from hpc_mp.doctor.nccl_log.parse import TABLE, NcclTruth, parse, trouble_rows

_EXPLAINING = ("NCCL_NET", "NCCL_IB_DISABLE", "NCCL_IB_HCA", "NCCL_NET_PLUGIN", "NCCL_NET_GDR_LEVEL", "NCCL_NET_GDR_READ",
               "NCCL_DMABUF_ENABLE",
               "NCCL_P2P_DISABLE", "NCCL_P2P_LEVEL", "NCCL_SHM_DISABLE", "NCCL_SOCKET_IFNAME", "NCCL_TOPO_FILE")
_STATUSES = {  # meanings of a completion's status, ibv_wc_status
    5: "flushed, after another error", 9: "the other side's memory or key is gone", 10: "remote access error",
    12: "no answer from the other side in spite of retries: link, cable, route, or a dead peer", 13: "the receiver was not ready",
}


@dataclass(frozen=True, slots=True)
class Machine:
    """The hardware of the job's nodes on which NCCL's choice depends."""

    fabric: Literal["infiniband", "efa", "roce", ""] = ""  # kind of the fast network; empty if there is none
    nics: int | None = None  # number of its ports that are up, per node; None if unknown
    switched: bool = False  # True if the GPUs of a node are connected by NVSwitches


def machine_of(source: NodeSource) -> Machine:
    """Read this machine's hardware from its files. Never raises."""
    fabric = read_fabric(source)
    ports = [port for port in fabric.ports if port.up]
    kind: Literal["infiniband", "efa", "roce", ""] = ""
    if any(fabric.adapter(port).efa for port in fabric.ports):
        kind = "efa"
    elif fabric.ports:
        kind = "infiniband" if any(port.layer == "InfiniBand" for port in fabric.ports) else "roce"
    switched = any(model.switched for model in read_models(source)) or count_nvswitches(source) > 0
    return Machine(kind, len(ports) or None, switched)


def judge(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    """Yield an error if NCCL does not use the machine's fast network although it could, a warning if it uses part of it."""
    if not truth.lines:
        yield Finding("nccl-network", "unknown", "", "no line of NCCL's log", "run with NCCL_DEBUG=INFO")
        return
    yield from _network(truth, machine)
    yield from _gdr(truth, machine)
    yield from _nics(truth, machine)
    yield from _inside(truth, machine)
    yield from _started(truth)
    yield from _troubles(truth, machine)


def refused(findings: Iterable[Finding]) -> list[Finding]:
    """Return the errors, with which a training should not be started."""
    return [finding for finding in findings if finding.severity == "error"]


def _network(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    code = "nccl-network"
    used = ", ".join(f"{name} in {count} process{'es' if count > 1 else ''}" for name, count in sorted(truth.networks.items()))
    slow = [name for name in truth.networks if _is_socket(name) or (machine.fabric == "efa" and name == "IB")]
    hosts = sorted(set().union(*(truth.network_hosts[name] for name in slow)))
    if truth.provider and machine.fabric == "efa" and not truth.provider[0].startswith("efa"):
        yield Finding(code, "error", "", f"the OFI plug-in chose {truth.provider[0]} on a machine with EFA{_set(truth)}",
                      "look for the EFA provider with fi_info -p efa; install EFA's libfabric on every node and in the container")
    elif slow and machine.fabric:
        severity: Severity = "warning" if machine.fabric == "roce" else "error"
        evidence = f"NCCL uses {used}; the machine has {_FABRICS[machine.fabric]}{_set(truth)}"
        yield Finding(code, severity, several(hosts), evidence, _REMEDIES[machine.fabric])
    elif truth.networks:
        yield Finding(code, "ok", "", f"NCCL uses {used}" + ("" if machine.fabric else "; no fast network is seen here"))
    elif truth.nodes == 1:
        yield Finding(code, "ok", "", "the log names no network, and one node needs none")
    else:
        yield Finding(code, "unknown", "", "the log names no network", "run with NCCL_DEBUG=INFO and without NCCL_DEBUG_SUBSYS")


def _gdr(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    paths = [channel for channel in truth.channels if truth.between_nodes(channel) and not _is_socket(channel.how)]
    without = [channel for channel in paths if not channel.gdr]
    if not paths:
        yield from _gdr_possible(truth, machine)
        return
    if not without:
        yield Finding("nccl-gdr", "ok", "", f"all {len(paths)} paths between nodes use GPUDirect")
        return
    devices = sorted({channel.device for channel in without if channel.device is not None})
    disabled = sorted(name for name, possible in truth.gdr.items() if not possible)
    which = f"; NCCL found it impossible for {several(disabled)}" if disabled else ""
    severity: Severity = "error" if machine.fabric in ("infiniband", "efa") else "warning"
    yield Finding("nccl-gdr", severity, f"network device {several([str(device) for device in devices])}",
                  f"{len(without)} of {len(paths)} paths between nodes go through the host's memory, without GPUDirect"
                  f"{which}{_set(truth)}", _REMEDIES["gdr"])


def _gdr_possible(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    """Yield findings from NCCL's scan of its adapters, for a job without paths between nodes, such as one rank."""
    if not truth.gdr or any(_is_socket(name) for name in truth.networks):
        return
    disabled = sorted(name for name, possible in truth.gdr.items() if not possible)
    if not disabled:
        yield Finding("nccl-gdr", "ok", "", f"NCCL found GPUDirect possible for all {len(truth.gdr)} adapters")
        return
    grave = machine.fabric in ("infiniband", "efa") and len(disabled) == len(truth.gdr)
    yield Finding("nccl-gdr", "error" if grave else "warning", several(disabled),
                  f"NCCL found GPUDirect impossible for {len(disabled)} of {len(truth.gdr)} adapters: what they carry goes "
                  f"through the host's memory{_set(truth)}", _REMEDIES["gdr"])


def _nics(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    if machine.nics is None or not truth.networks or all(_is_socket(name) for name in truth.networks):
        return
    kind = {"infiniband": "/IB", "roce": "/RoCE", "efa": ""}.get(machine.fabric, "")
    counts = {host: (sum(name.endswith(kind) for name in names), len(names)) for host, names in truth.adapters.items() if names}
    if truth.provider and truth.provider[1] is not None:
        counts = {"every host": (truth.provider[1], truth.provider[1])}
    few = {pair: sorted(host for host in counts if counts[host] == pair) for pair in counts.values() if pair[0] < machine.nics}
    for (count, of_all), hosts in sorted(few.items()):
        others = f" of {_FABRICS[machine.fabric]}, and {of_all - count} others" if of_all > count and machine.fabric else ""
        evidence = f"NCCL found {count} adapters{others}; the machine has {machine.nics} ports up{_set(truth)}"
        yield Finding("nccl-nics", "warning", several(hosts), evidence,
                      "look at NCCL_IB_HCA, at the ports' state, and at the devices of the container or job")
    if counts and not few:
        used = len({channel.device for channel in truth.channels if truth.between_nodes(channel)})
        yield Finding("nccl-nics", "ok", "", f"NCCL found {min(counts.values())[0]} adapters per node, and uses {used} devices")


def _inside(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    inside = [channel for channel in truth.channels if truth.inside(channel)]
    paths = Counter(channel.via for channel in inside)
    detour = paths["SHM"] + paths["NET"]
    shown = ", ".join(f"{count} via {via}" for via, count in sorted(paths.items()))
    if detour and machine.switched:
        pairs = sorted({f"{channel.sender}→{channel.receiver}" for channel in inside if channel.via != "P2P"})
        yield Finding("nccl-inside", "warning", f"ranks {several(pairs)}",
                      f"inside a node {shown}: the GPUs are joined by NVSwitches and do not use them{_set(truth)}",
                      "give every task all GPUs of the node (--gpus-per-node, never --gpus-per-task), unset NCCL_P2P_DISABLE, "
                      "and look at gpu-p2p")
    elif inside:
        yield Finding("nccl-inside", "ok", "", f"inside a node {shown}")


def _started(truth: NcclTruth) -> Iterator[Finding]:
    missing = sorted(truth.started - truth.completed)
    if missing and truth.completed | truth.started:
        hosts = sorted({truth.hosts[key] for key in missing})
        yield Finding("nccl-start", "warning", several(hosts),
                      f"{len(missing)} of {len(truth.started)} ranks never completed their start: "
                      f"{several([str(rank) for _, rank in missing])}",
                      "look at these hosts' network, and at what else this log says of them")
    elif truth.completed:
        yield Finding("nccl-start", "ok", "", f"{len(truth.completed)} ranks completed their start"
                      + (f", nodes: {truth.nodes}" if truth.nodes else ""))


def _troubles(truth: NcclTruth, machine: Machine) -> Iterator[Finding]:
    groups = grouped(((trouble.kind, trouble.host, trouble.hca), trouble) for trouble in truth.troubles)
    for (kind, host, hca), group in groups.items():
        first, row = group[0], trouble_rows()[kind]
        severity: Severity = row["severity"]
        if row["fabrics"] and truth.networks:
            fast = any(not _is_socket(name) for name in truth.networks)
            if fast or (machine.fabric and machine.fabric not in row["fabrics"]):
                continue
            severity = severity if machine.fabric else "warning"
        meaning = _STATUSES.get(first.code or 0, "") if kind == "completion" else row["means"]
        message = f"{meaning}: {first.words}" if meaning else first.words
        times = f"; {len(group)} such lines" if len(group) > 1 else ""
        yield Finding(f"nccl-{kind}", severity, f"{host} {hca}".strip(), message + times, row["cure"])


def _set(truth: NcclTruth) -> str:
    """Return the variables that may explain a finding, as text."""
    settings = [f"{name}={truth.environment[name]}" for name in _EXPLAINING if name in truth.environment]
    return f" ({', '.join(settings)} is set)" if settings else ""


def _is_socket(name: str) -> bool:
    return "socket" in name.lower()


_FABRICS = {"infiniband": "InfiniBand", "efa": "EFA", "roce": "RoCE"}
_REMEDIES: Mapping[str, str] = asset_table(TABLE)["remedies"]


PATIENCE_S = 60.0  # torch, CUDA and NCCL take 10 to 30 s to start from a cold file system
PROBE = "nccl-probe"
PROGRAMS = {PROBE: OwnProgram((sys.executable, "-P", "-m", "hpc_mp.doctor.nccl_log.probe"), PATIENCE_S)}


def taken(source: NodeSource, patience: float = PATIENCE_S) -> tuple[Finding, ...]:
    """Return findings on a new log of NCCL, which the machine's program ``nccl-probe`` writes. None without GPUs or a fast
    network, or if no log comes within ``patience`` seconds."""
    findings = in_time({PROBE: lambda: _taken(source)}, patience)[PROBE]
    return () if isinstance(findings, Unavailable) else findings


def logged(logs: Iterable[Path], source: NodeSource) -> tuple[Finding, ...]:
    """Return findings on the logs of one job's ranks on this kind of machine. A directory means all files below it. Raises
    HpcMpError if a log cannot be read."""
    return tuple(judge(parse(chain.from_iterable(map(_lines, logs))), machine_of(source)))


def _taken(source: NodeSource) -> tuple[Finding, ...]:
    machine = machine_of(source)
    if not (machine.fabric and has_gpus(source)):
        return ()
    return tuple(judge(parse(source.answer([PROBE]).splitlines()), machine))


def _lines(log: Path) -> Iterator[str]:
    try:
        for file in sorted(path for path in log.rglob("*") if path.is_file()) if log.is_dir() else [log]:
            with file.open(encoding="utf-8", errors="replace") as lines:
                yield from lines
    except OSError as error:
        raise HpcMpError(f"--nccl-log {log}", f"cannot be read ({error.strerror})",
                         "name a file that was written with NCCL_DEBUG=INFO, or a directory of such") from None


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
