"""Writes the part of every tree that is no GPU: ``files-host.toml`` and ``commands-host.json``. Run it after a change:
``python -m tests.machines.rebuild_host``. What is written by hand is in ``files-more.toml``.

Nothing here was recorded on such a machine. Addresses, NUMA nodes and PCI speeds are those of the topology files of
azhpc-images (ND) and aws-ofi-nccl (p4d, p5); names, rates and memory those of azurehpc-health-checks' conf files, of a
published lstopo of a p4d and of published NCCL logs (p5). What the drivers show is as in the kernel's sources (mlx5, efa).
LIDs, GUIDs and keys are made up.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, field
from pathlib import Path

from tests.machines.tree import row

HERE = Path(__file__).parent
Files = dict[str, str | dict[str, str]]  # a path to its text, or {"link": where it leads}
LINK = ("link_downed", "link_error_recovery", "symbol_error", "port_rcv_errors", "port_xmit_discards",
        "local_link_integrity_errors", "excessive_buffer_overrun_errors", "port_xmit_constraint_errors",
        "port_rcv_constraint_errors", "VL15_dropped", "port_xmit_wait", "port_xmit_data", "port_rcv_data")
MLX5 = ("local_ack_timeout_err", "packet_seq_err", "out_of_sequence", "rnr_nak_retry_err", "implied_nak_seq_err",
        "req_transport_retries_exceeded", "req_cqe_error", "roce_slow_restart")
EFA = ("rx_drops", "retrans_pkts", "retrans_timeout_events", "impaired_remote_conn_events", "unresponsive_remote_events",
       "rdma_read_wr_err", "rdma_write_wr_err", "tx_bytes", "rx_bytes")


@dataclass(frozen=True)
class Adapters:
    """Of one model. ``numbers``: PCI vendor, device, class; ``netdevs``: of InfiniBand, its interfaces for IP."""

    names: tuple[str, ...]
    buses: tuple[str, ...]
    numa: tuple[int, ...]
    numbers: tuple[str, str, str]
    rate: str
    layer: str
    pcie: tuple[str, int]
    board: str = ""
    firmware: str = "0.0.0.0"
    netdevs: tuple[str, ...] = ()


@dataclass(frozen=True)
class Host:
    """One machine. ``nodes``: processors of every NUMA node; ``memory`` in kB; ``disks``: NVMe model and number."""

    name: str
    dmi: tuple[str, str]
    nodes: tuple[str, ...]
    cpus: int
    sockets: int
    memory: int
    disks: tuple[str, int]
    adapters: tuple[Adapters, ...] = ()
    ethernet: tuple[tuple[str, str, str], ...] = (("eth0", "hv_netvsc", "50000"),)
    flags: str = "flags\t\t: fpu sse2 hypervisor"
    modules: tuple[str, ...] = ("nvidia", "nvidia_uvm", "nvidia_peermem", "gdrdrv", "ib_uverbs", "ib_core", "mlx5_ib")
    more: dict[str, str] = field(default_factory=dict)


def _band(number: int, device: str, rate: str, numa: tuple[int, ...], **more: str) -> Adapters:
    names = tuple(f"mlx5_ib{index}" for index in range(number))
    buses = tuple(f"010{index + 1}:00:00.0" for index in range(number))
    return Adapters(names, buses, numa, ("0x15b3", device, "0x020700"), rate, "InfiniBand",
                    ("32.0 GT/s PCIe" if device != "0x101c" else "16.0 GT/s PCIe", 16),
                    netdevs=tuple(f"ib{index}" for index in range(number)), **more)


def _efa(buses: tuple[str, ...], device: str, numa: tuple[int, ...], pcie: tuple[str, int]) -> Adapters:
    def name(bus: str) -> str:
        _, number, slot = bus.partition(".")[0].split(":")
        return f"rdmap{int(number, 16)}s{int(slot, 16)}"
    return Adapters(tuple(map(name, buses)), buses, numa, ("0x1d0f", device, "0x020000"), "100 Gb/sec (4X EDR)", "Unknown", pcie)


NDR, HDR = "400 Gb/sec (4X NDR)", "200 Gb/sec (4X HDR)"
AN0 = Adapters(("mlx5_an0",), ("c4a1:00:00.0",), (0,), ("0x15b3", "0x101a", "0x020000"), "100 Gb/sec (4X EDR)", "Ethernet",
               ("16.0 GT/s PCIe", 16), "MSF0010110035", "16.31.2424", ("eth1",))
AZURE = ("Microsoft Corporation", "Virtual Machine")
TWO = ("0-47", "48-95")
P5_BUSES = tuple(f"0000:{base + at:02x}:00.0" for base in (0x4f, 0x60, 0x71, 0x82, 0x93, 0xa4, 0xb5, 0xc6) for at in range(4))
AWS_FILES = {"/sys/module/efa/version": "2.17.2g", "/opt/amazon/efa/lib/libfabric.so.1": "",
             "/opt/amazon/ofi-nccl/lib/x86_64-linux-gnu/libnccl-net.so": ""}
AWS_MODULES = ("nvidia", "nvidia_uvm", "gdrdrv", "efa", "ib_uverbs", "ib_core", "ena", "efa_nv_peermem")
HOSTS = (
    Host("ndv4", AZURE, ("0-23", "24-47", "48-71", "72-95"), 96, 2, 928858388, ("Microsoft NVMe Direct Disk", 6),
         (_band(8, "0x101c", HDR, (1, 1, 0, 0, 3, 3, 2, 2), board="MT_0000000223", firmware="20.31.1014"),)),
    Host("ndv5", AZURE, TWO, 96, 2, 1961032704, ("Microsoft NVMe Direct Disk", 8),
         (_band(8, "0x101e", NDR, (0, 0, 0, 0, 1, 1, 1, 1), board="MT_0000000838", firmware="28.39.2048"),)),
    Host("ndh200v5", AZURE, TWO, 96, 2, 1909409116, ("Microsoft NVMe Direct Disk v2", 8),
         (_band(8, "0x101e", NDR, (0, 0, 0, 0, 1, 1, 1, 1), board="MT_0000000838", firmware="28.41.1000"), AN0)),
    Host("gb200", AZURE, ("0-63", "64-127"), 128, 2, 920000000, ("Microsoft NVMe Direct Disk v2", 4),
         (_band(4, "0x101e", NDR, (0, 0, 1, 1), board="MT_0000000838", firmware="28.43.1014"),), flags="Features\t: fp asimd"),
    Host("p4d", ("Amazon EC2", "p4d.24xlarge"), ("0-23,48-71", "24-47,72-95"), 96, 2, 1176185304,
         ("Amazon EC2 NVMe Instance Storage", 8),
         (_efa(("0000:10:1b.0", "0000:20:1b.0", "0000:90:1b.0", "0000:a0:1b.0"), "0xefa0", (0, 0, 1, 1), ("8.0 GT/s PCIe", 16)),),
         (("ens32", "ena", ""),), modules=AWS_MODULES, more=AWS_FILES),
    Host("p5", ("Amazon EC2", "p5.48xlarge"), ("0-47,96-143", "48-95,144-191"), 192, 2, 2097145856,
         ("Amazon EC2 NVMe Instance Storage", 8), (_efa(P5_BUSES, "0xefa1", (0,) * 16 + (1,) * 16, ("16.0 GT/s PCIe", 8)),),
         (("ens32", "ena", ""),), modules=AWS_MODULES, more=AWS_FILES),
    Host("ethernet", ("Dell Inc.", "PowerEdge R640"), ("0-15,32-47", "16-31,48-63"), 64, 2, 395900000,
         ("Dell Ent NVMe P5600", 2),
         (), tuple((f"eno{number}", "bnxt_en", "25000") for number in (1, 2, 3)), flags="flags\t\t: fpu sse2",
         modules=("bnxt_en", "xfs")),
)


def _braces(values: tuple[object, ...]) -> str:
    return "{" + ",".join(map(str, values)) + "}" if len(values) > 1 else str(values[0])


def _files(host: Host) -> Files:
    cpus = sorted((cpu, node) for node, text in enumerate(host.nodes) for cpu in _members(text))
    packages = [node * host.sockets // len(host.nodes) for _, node in cpus]
    share = host.memory // len(host.nodes)
    files: Files = {
        "/proc/cpuinfo": f"processor\t: 0\n{host.flags}",
        "/proc/meminfo": f"MemTotal:       {host.memory} kB\nMemFree:        {host.memory * 9 // 10} kB\n"
                         f"MemAvailable:   {host.memory * 19 // 20} kB\nSwapTotal:             0 kB\n"
                         "SwapFree:              0 kB\nHugePages_Total:       0\nHugePages_Free:        0\n"
                         "Hugepagesize:       2048 kB",
        "/proc/self/status": f"Name:\tpython3\nCpus_allowed_list:\t0-{host.cpus - 1}",
        "/proc/modules": "\n".join(f"{name} 1000 0 - Live 0x0" for name in host.modules),
        "/sys/class/dmi/id/sys_vendor": host.dmi[0],
        "/sys/class/dmi/id/product_name": host.dmi[1],
        "/sys/devices/system/cpu/online": f"0-{host.cpus - 1}",
        "/sys/devices/system/cpu/offline": "",
        "/sys/fs/cgroup/system.slice/slurmd.service/cpuset.cpus.effective": f"0-{host.cpus - 1}",
        f"/sys/devices/system/cpu/cpu{{0..{host.cpus - 1}}}/topology/physical_package_id": _braces(tuple(packages)),
    }
    for node, text in enumerate(host.nodes):
        files[f"/sys/devices/system/node/node{node}/cpulist"] = text
        files[f"/sys/devices/system/node/node{node}/meminfo"] = f"Node {node} MemTotal:       {share} kB"
    model, number = host.disks
    for name, text in (("state", "live"), ("model", model)):
        files[f"/sys/class/nvme/nvme{{0..{number - 1}}}/{name}"] = text
    for name, driver, speed in host.ethernet:
        files |= _interface(name, driver, speed, "1", "1500")
    verbs = 0
    for group in host.adapters:
        files |= _adapter(group, verbs)
        verbs += len(group.names)
    if host.adapters:
        files["/sys/class/infiniband_verbs/abi_version"] = "6"
        files["/sys/class/infiniband_mad/abi_version"] = "5"
    return files | host.more


def _interface(name: str, driver: str, speed: str, kind: str, mtu: str) -> Files:
    base = f"/sys/class/net/{name}"
    files: Files = {f"{base}/type": kind, f"{base}/operstate": "up", f"{base}/mtu": mtu, f"{base}/flags": "0x1003",
                                f"{base}/carrier_changes": "2", f"{base}/carrier_down_count": "1",
                                f"{base}/device/driver": {"link": f"../../../../bus/drivers/{driver}"}}
    if speed:
        files |= {f"{base}/speed": speed, f"{base}/duplex": "full"}
    counts = ("rx_errors", "tx_errors", "rx_crc_errors", "rx_dropped", "tx_dropped", "rx_missed_errors")
    files[f"{base}/statistics/{_braces(counts)}"] = "0"
    files[f"{base}/statistics/{_braces(('rx_packets', 'tx_packets'))}"] = "5000000"
    return files


def _adapter(group: Adapters, first: int) -> Files:
    names, buses = _braces(group.names), _braces(group.buses)
    pci, base = f"/sys/bus/pci/devices/{buses}", f"/sys/class/infiniband/{names}"
    port, many = f"{base}/ports/1", len(group.names)
    band, amazon = group.layer == "InfiniBand", group.numbers[0] == "0x1d0f"
    files: Files = {
        f"{pci}/vendor": group.numbers[0], f"{pci}/device": group.numbers[1], f"{pci}/class": group.numbers[2],
        f"{pci}/numa_node": _braces(group.numa), f"{base}/device": {"link": f"../../../bus/pci/devices/{buses}"},
        f"{pci}/{{current,max}}_link_speed": group.pcie[0], f"{pci}/{{current,max}}_link_width": str(group.pcie[1]),
        f"{base}/fw_ver": group.firmware,
        f"{port}/state": "4: ACTIVE", f"{port}/phys_state": "5: LinkUp", f"{port}/rate": group.rate,
        f"{port}/link_layer": group.layer,
        f"{port}/gids/0": f"fe80:0000:0000:0000:0015:5dff:fe33:{_braces(tuple(f'{0xff10 + at:04x}' for at in range(many)))}",
        f"{port}/gid_attrs/types/0": "IB/RoCE v1",
        f"{port}/hw_counters/{_braces(EFA if amazon else MLX5)}": "0",
        f"/sys/class/infiniband_verbs/uverbs{_braces(tuple(range(first, first + many)))}/ibdev": names,
        f"/dev/infiniband/uverbs{_braces(tuple(range(first, first + many)))}": "",
    }
    if group.board:
        files[f"{base}/board_id"] = group.board
    if not amazon:
        files[f"{port}/counters/{_braces(LINK)}"] = "0"
    if band:
        files |= {f"{port}/lid": _braces(tuple(f"{0x4d1 + at:#x}" for at in range(many))), f"{port}/sm_lid": "0x1",
                  f"{port}/pkeys/0": "0x80d2", f"{port}/pkeys/1": "0x7fff", f"{port}/pkeys/2": "0x0000"}
    if group.layer == "Ethernet":
        files |= {f"{port}/gids/1": "0000:0000:0000:0000:0000:ffff:0a00:0011", f"{port}/gid_attrs/types/1": "RoCE v2",
                  f"{port}/gid_attrs/ndevs/{{0,1}}": group.netdevs[0]}
    for index, name in enumerate(group.netdevs):
        kind, mtu = ("32", "2044") if band else ("1", "1500")
        files |= _interface(name, "mlx5_core", "", kind, mtu)
        files[f"/sys/bus/pci/devices/{group.buses[index]}/net/{name}/type"] = kind
    return files


def _members(text: str) -> list[int]:
    found: list[int] = []
    for part in text.split(","):
        first, _, last = part.partition("-")
        found += range(int(first), int(last) + 1)
    return found


def _commands(host: Host) -> dict[str, dict[str, object]]:
    shown = []
    for group in host.adapters:
        mtu = "1024 (3)" if group.layer == "Ethernet" else "4096 (5)"
        shown += [f"hca_id:\t{name}\n\tphys_port_cnt:\t\t\t1\n\t\tport:\t1\n\t\t\tstate:\t\t\tPORT_ACTIVE (4)\n\t\t\t"
                  f"max_mtu:\t\t4096 (5)\n\t\t\tactive_mtu:\t\t{mtu}\n" for name in group.names]
    commands: dict[str, dict[str, object]] = {"ibv_devinfo": {"code": 0, "out": "\n".join(shown)}} if shown else {}
    for name, driver, _ in host.ethernet:
        counters = {"ena": ("bw_in_allowance_exceeded", "bw_out_allowance_exceeded", "pps_allowance_exceeded"),
                    "bnxt_en": ("rx_pause_frames", "tx_pause_frames", "rx_discard_pkts", "rx_crc_err_frames"),
                    "hv_netvsc": ("tx_no_buffer", "vf_rx_packets")}[driver]
        lines = "".join(f"     {counter}: 0\n" for counter in counters)
        commands[f"ethtool -S {name}"] = {"code": 0, "out": f"NIC statistics:\n{lines}"}
    return commands


def main() -> None:
    for host in HOSTS:
        rows = (row(path, value) for path, value in _files(host).items())
        head = "# All but GPUs: rebuilt from documentation by tests/machines/rebuild_host.py, which names its sources.\n"
        (HERE / host.name / "files-host.toml").write_text(head + "".join(rows), encoding="utf-8")
        (HERE / host.name / "commands-host.json").write_text(json.dumps(_commands(host), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
