"""What can be wrong with a node, apart from its GPUs: for every check, what to change in a healthy tree, and what it must say."""

from __future__ import annotations

import json
from typing import Any

from case import Case
from machines.tree import HANGS, tree

from hpc_mp.cluster.node.counters import KEPT, read_counters
from hpc_mp.cluster.node.source import SHARED

IB = "/sys/class/infiniband"
NET = "/sys/class/net"
MC = "/sys/devices/system/edac/mc"
SYS = "/proc/sys"
CPU = "/sys/devices/system/cpu"
UNIT = "/sys/fs/cgroup/system.slice/slurmd.service"
STAT = "stat -f -c %S %b %a %c %d"
FLAGS = "processor\t: 0\nflags\t\t: fpu sse2"
LIMIT = "Max {:<26}{:<21}{:<21}{}"


def earlier(kind: str) -> dict[str, Any]:
    """An edit: the counters of this tree were the same an hour ago."""

    reading = {"at": up(kind) - 3600, "values": read_counters(tree(kind))}
    boot = tree(kind).text("/proc/sys/kernel/random/boot_id")
    return {f"{SHARED}/{KEPT}": json.dumps({"boot": boot, "readings": [reading]})}


def up(kind: str) -> float:
    """Seconds since this tree's boot."""
    return float(tree(kind).text("/proc/uptime").split()[0])


METAL = {"/proc/cpuinfo": FLAGS, "/sys/class/dmi/id/sys_vendor": "NVIDIA", "/sys/class/dmi/id/product_name": "DGXH100",
         "lspci -D -vvv -d ::0604": "0101:f0:00.0 PCI bridge: Broadcom PEX890xx\n\tBus: primary=f0, secondary=00, subordinate=01"
                                    "\n\tCapabilities: [1b0] Access Control Services\n"
                                    "\t\tACSCap:\tSrcValid+ TransBlk+ ReqRedir+ CmpltRedir+ UpstreamFwd+ EgressCtrl-\n"
                                    "\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir- CmpltRedir- UpstreamFwd- EgressCtrl-\n"
                                    "0000:15:00.0 PCI bridge: Broadcom PEX890xx\n\tBus: primary=15, secondary=16, subordinate=1c"
                                    "\n\t\tACSCtl:\tSrcValid+ TransBlk- ReqRedir+ CmpltRedir+ UpstreamFwd+\n",
         "/sys/bus/pci/devices/{0101:00:00.0,0001:00:00.0}/iommu_group": {"link": "../../../../kernel/iommu_groups/{17,18}"},
         "/sys/kernel/iommu_groups/{17,18}/type": "identity"}
RAID = "md0 : active raid1 nvme1n1[1] nvme0n1[0]\n      7000 blocks super 1.2 [2/2] [UU]"
GDRCOPY = {"/usr/lib/x86_64-linux-gnu/libgdrapi.so.2": ""}
CLOCKS = {"chronyc -c tracking": "00000000,,0,0.0,0.0,0.0,0.0,0.0,0.0,0.0,1.0,1.0,0.0,Not synchronised\n"}
JOB = {"/proc/self/environ": "SLURM_CPUS_ON_NODE=96\0SLURM_MEM_PER_NODE=900000\0PATH=/bin"}
V1 = {"/sys/fs/cgroup/cgroup.controllers": None,
"/proc/self/cgroup": "4:memory:/slurm/uid_0/job_7\n3:cpuset:/\n2:pids:/slurm\n0::/",
      "/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.limit_in_bytes": "9223372036854771712",
      "/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.usage_in_bytes": "1000000",
      "/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 0",
      "/sys/fs/cgroup/memory/slurm/memory.limit_in_bytes": "500000000000",
      "/sys/fs/cgroup/pids/slurm/pids.max": "max", "/sys/fs/cgroup/cpuset/cpuset.cpus": "0-95"}
# what a check needs beside a tree to have something to be content with
GOOD: dict[str, tuple[str, dict[str, Any]]] = {
    "efa-software": ("p5", {}), "efa-errors": ("p5", earlier("p5")), "pci-acs": ("ndv5", METAL), "pci-iommu": ("ndv5", METAL),
    "gdrcopy": ("ndv5", GDRCOPY), "disk-raid": ("ndv5", {"/proc/mdstat": RAID}), "cgroup-memory": ("ndv5", V1),
    "cgroup-cpus": ("ndv5", JOB), "cgroup-oom": ("ndv5", V1),
    "cgroup-pids": ("ndv5", {f"{UNIT}/pids.max": "200000"}),
    **{code: ("ethernet", earlier("ethernet")) for code in ("memory-errors", "cpu-throttle", "pci-errors", "ethernet-pause")},
    **{code: ("ethernet", {}) for code in ("cpu-governor", "cpu-frequency", "ethernet-speed", "connection-tracking")},
    **{code: ("ndv5", earlier("ndv5")) for code in ("fabric-errors", "fabric-retransmits", "fabric-congestion", "link-flap",
                                                    "ethernet-errors", "ethernet-discards", "tcp-retransmits", "tcp-listen")},
}


def _fabric(code: str, edits: dict[str, Any], outcome: str, says: str, **more: Any) -> Case:
    return Case(code, more.pop("kind", "ndv5"), edits, outcome, says, **more)


def _growth(code: str, kind: str, edits: dict[str, Any], outcome: str, says: str, **more: Any) -> Case:
    return Case(code, kind, earlier(kind) | edits, outcome, says, **more)


def resource_limit(name: str, soft: object, hard: object) -> dict[str, Any]:
    lines = {"stack size": (8388608, "unlimited"), "processes": (7400000, 7400000), "open files": (1048576, 1048576),
             "locked memory": ("unlimited", "unlimited")} | {name: (soft, hard)}
    return {"/proc/self/limits": "\n".join(LIMIT.format(each, *map(str, pair), "") for each, pair in lines.items())}


def process(pid: int, name: str, state: str, parent: int, user: int, born: int = 100) -> dict[str, Any]:
    return {f"/proc/{pid}/stat": f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {born} 0",
            f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{user}\t0\t0\t0\nvoluntary_ctxt_switches:\t9",
            f"/proc/{pid}/comm": name, f"/proc/{pid}/wchan": "rpc_wait_bit_killable" if state == "D" else "0"}


def logged(line: str, ago: float = 1000.0) -> dict[str, Any]:
    return {"/dev/kmsg": f"6,1,0,-;Linux version 6.8.0\n4,2,{(up('ndv5') - ago) * 1e6:.0f},-;{line}\n"}


def _tcp(sent: int, again: int) -> tuple[str, str]:
    return ("6000000 1200 0 300", f"{6_000_000 + sent} {1200 + again} 0 300")


FAULTS: tuple[Case, ...] = (
    _fabric("fabric-count", {f"{IB}/mlx5_ib7": None, "/sys/bus/pci/devices/0108:00:00.0": None}, "error",
            "7 ports; a Standard_ND96isr", also=("nic-gpu",)),
    _fabric("fabric-count", {f"{IB}/mlx5_ib7": None}, "error",
            "0108:00:00.0: 1 adapters for RDMA on the PCI bus have no RDMA device", many=2),
    _fabric("fabric-count", {f"{IB}/mlx5_ib{{0..7}}": None,
            "/sys/bus/pci/devices/{0101,0102,0103,0104,0105,0106,0107,0108}:00:00.0":
            None}, "warning", "unless it was rented without"),
    _fabric("fabric-count", {f"{IB}/rdmap201s0": None, "/sys/bus/pci/devices/0000:c9:00.0": None}, "error",
            "31 ports; a p5.48xlarge", kind="p5"),
    _fabric("fabric-modules", {"/sys/class/infiniband_verbs/abi_version": None}, "error", "ib_uverbs is not loaded"),
    _fabric("fabric-modules", {"/sys/class/infiniband_mad/abi_version": None}, "warning", "ib_umad is not loaded"),
    _fabric("fabric-modules", {"/dev/infiniband/uverbs3": None}, "error", "mlx5_ib3: its file"),
    _fabric("fabric-port", {f"{IB}/mlx5_ib3/ports/1/state": "1: DOWN", f"{IB}/mlx5_ib3/ports/1/phys_state": "2: Polling"},
            "error", "mlx5_ib3 port 1: state 1: DOWN, physical state 2: Polling"),
    _fabric("fabric-port", {f"{IB}/mlx5_ib0/ports/1/state": "2: INIT"}, "error", "mlx5_ib0 port 1: state 2: INIT"),
    _fabric("fabric-port", {f"{IB}/rdmap79s0/ports/1/state": "1: DOWN"}, "error", "rdmap79s0 port 1", kind="p5"),
    _fabric("fabric-rate", {f"{IB}/mlx5_ib5/ports/1/rate": "200 Gb/sec (2X NDR)"}, "error", "mlx5_ib5 port 1: 200 Gb/s"),
    _fabric("fabric-rate", {f"{IB}/mlx5_ib5/ports/1/rate": "100 Gb/sec (1X NDR)", **METAL}, "error", "its likes here have 400"),
    _fabric("fabric-subnet", {f"{IB}/mlx5_ib2/ports/1/sm_lid": "0x0"}, "error",
            "mlx5_ib2 port 1: own address 0x4d3, subnet manager's 0x0"),
    _fabric("fabric-firmware", {f"{IB}/mlx5_ib6/fw_ver": "28.36.1010"}, "warning", "28.39.2048 on 7, 28.36.1010 on 1"),
    _fabric("fabric-partition", {f"{IB}/mlx5_ib1/ports/1/pkeys/0": "0x0000"}, "error",
            "mlx5_ib1 port 1: partition table has no key"),
    _fabric("fabric-partition", {f"{IB}/mlx5_ib1/ports/1/pkeys/0": "0x00d2"}, "error",
            "no key in the table is a full membership"),
    _fabric("fabric-partition", {f"{IB}/mlx5_ib1/ports/1/pkeys/0": "0x8001"}, "error", "most ports here have 0x80d2"),
    _fabric("fabric-gid", {f"{IB}/mlx5_ib4/ports/1/gids/0": "0000:0000:0000:0000:0000:0000:0000:0000"}, "error",
            "mlx5_ib4 port 1"),
    _fabric("fabric-gid", {f"{IB}/mlx5_ib{{0..7}}/ports/1/link_layer": "Ethernet"}, "warning", "none of them RoCE v2 over IPv4",
            many=8),
    _fabric("fabric-gid", {f"{IB}/mlx5_ib{{0..7}}/ports/1/link_layer": "Ethernet",
                           f"{IB}/mlx5_ib{{0..7}}/ports/1/gids/0": "0000:0000:0000:0000:0000:0000:0000:0000"}, "error",
            "its table of addresses (GIDs) is empty", many=8),
    _fabric("fabric-mtu", {"ibv_devinfo": ("active_mtu:\t\t4096 (5)\n\nhca_id:\tmlx5_ib3",
            "active_mtu:\t\t2048 (4)\n\nhca_id:\tmlx5_ib3")},
            "warning", "mlx5_ib2 port 1: active MTU 2048; 4096 was expected"),
    _fabric("efa-software", {"/opt/amazon/efa": None}, "error", "libfabric: is not in any of its places", kind="p4d"),
    _fabric("efa-software", {"/opt/amazon/ofi-nccl": None}, "warning", "aws-ofi-nccl", kind="p4d"),
    _growth("fabric-errors", "ndv5", {f"{IB}/mlx5_ib2/ports/1/counters/symbol_error": "17"}, "warning",
            "symbol_error +17 in 1 h"),
    _growth("fabric-errors", "ndv5", {f"{IB}/mlx5_ib2/ports/1/counters/local_link_integrity_errors": "900"}, "error",
            "mlx5_ib2 port 1"),
    _growth("fabric-retransmits", "ndv5", {f"{IB}/mlx5_ib2/ports/1/hw_counters/local_ack_timeout_err": "40"}, "warning",
            "_err +40"),
    _growth("fabric-retransmits", "ndv5", {f"{IB}/mlx5_ib2/ports/1/hw_counters/packet_seq_err": "200000"}, "error", "+200000"),
    _growth("fabric-congestion", "ndv5", {f"{IB}/mlx5_ib0/ports/1/counters/port_xmit_wait": "9000000",
            f"{IB}/mlx5_ib0/ports/1/counters/port_xmit_data": "9000000"}, "warning",
            "mlx5_ib0 port 1: waited for credit in 50.0%"),
    _growth("efa-errors", "p5", {f"{IB}/rdmap79s0/ports/1/hw_counters/impaired_remote_conn_events": "20"}, "warning",
            "rdmap79s0 port 1"),
    _growth("efa-errors", "p5", {f"{IB}/rdmap79s0/ports/1/hw_counters/retrans_timeout_events": "200000"}, "error",
            "rdmap79s0 port 1"),
    _growth("link-flap", "ndv5", {f"{IB}/mlx5_ib2/ports/1/counters/link_downed": "1"}, "warning",
            "mlx5_ib2 port 1: went down 1 times"),
    _growth("link-flap", "ndv5", {f"{NET}/eth0/carrier_changes": "12"}, "error", "eth0: went down 5 times"),
    _growth("ethernet-errors", "ethernet", {f"{NET}/eno1/statistics/rx_crc_errors": "50"}, "warning", "eno1: rx_crc_errors +50"),
    _growth("ethernet-errors", "ethernet", {f"{NET}/eno1/statistics/rx_crc_errors": "5000"}, "error",
            "eno1: rx_crc_errors +5000"),
    _growth("ethernet-discards", "ndv5", {f"{NET}/eth0/statistics/rx_dropped": "50000"}, "warning", "eth0: 50000 of 0 packets"),
    _growth("ethernet-discards", "p5", {"ethtool -S ens32": ("bw_in_allowance_exceeded: 0", "bw_in_allowance_exceeded: 70000")},
            "warning", "ens32: 70000"),
    _growth("ethernet-pause", "ethernet", {"ethtool -S eno1": ("rx_pause_frames: 0", "rx_pause_frames: 900000")}, "warning",
            "eno1: rx_pause_frames +900000"),
    _growth("tcp-retransmits", "ndv5", {"/proc/net/snmp": _tcp(1_000_000, 4000)}, "warning",
            "4000 of 1000000 segments were sent again"),
    _growth("tcp-retransmits", "ndv5", {"/proc/net/snmp": _tcp(1_000_000, 90_000)}, "error", "(9.00%)"),
    _growth("tcp-listen", "ndv5", {"/proc/net/netstat": ("TcpExt: 0 0 0 15", "TcpExt: 0 700 700 15")}, "warning",
            "700 connections"),
    _growth("memory-errors", "ethernet", {f"{MC}/mc2/ue_count": "1"}, "error", "mc2: 1 errors since boot could not be corrected"),
    _growth("memory-errors", "ethernet", {f"{MC}/mc2/ce_count": "5001"}, "warning", "mc2: 5000 corrected errors"),
    _growth("cpu-throttle", "ethernet", {f"{CPU}/cpu5/thermal_throttle/package_throttle_count": "800"}, "warning", "798 times"),
    _growth("pci-errors", "ethernet", {"/sys/bus/pci/devices/0000:17:00.0/aer_dev_nonfatal": "TOTAL_ERR_NONFATAL 3"}, "error",
            "0000:17:00.0: 3 errors that could not be corrected"),
    _growth("pci-errors", "ethernet", {"/sys/bus/pci/devices/0000:17:00.0/aer_dev_correctable": "TOTAL_ERR_COR 9004"}, "warning",
            "9000 corrected"),
    Case("nic-pcie", "ndv5", {"/sys/bus/pci/devices/0103:00:00.0/current_link_width": "8"}, "warning",
          "mlx5_ib2 (0103:00:00.0): 8 of 16"),
    Case("nic-pcie", "ndv5", {"/sys/bus/pci/devices/0103:00:00.0/current_link_speed": "16.0 GT/s PCIe"}, "warning",
          "16 of 32 GT/s"),
    Case("nic-numa", "ndv5", {"/sys/bus/pci/devices/0103:00:00.0/numa_node": "-1"}, "warning",
          "mlx5_ib2: which of 2 memory nodes"),
    Case("nic-gpu", "ndv4", {"/sys/bus/pci/devices/{0103,0104}:00:00.0/numa_node": "1"}, "warning", "memory node 0", many=2),
    *(Case("pci-acs", "ndv5", METAL | {"lspci -D -vvv -d ::0604": METAL["lspci -D -vvv -d ::0604"].replace(f"{bit}-",
          f"{bit}+")},
            "warning", "0101:f0:00.0: access control redirects in 1 PCI bridges")
      for bit in ("ReqRedir", "CmpltRedir", "UpstreamFwd")),
    *(Case("nic-pcie", "ndv5", {"/sys/bus/pci/devices/0103:00:00.0/current_link_width": "63",
            "/sys/bus/pci/devices/0103:00:00.0/current_link_speed": "Unknown",
            "/sys/bus/pci/devices/0103:00:00.0/max_link_width": most}, "error", "(0103:00:00.0): its registers read as all ones")
      for most in ("16", "63", None)),
    Case("pci-acs", "ndv5", METAL | {"lspci -D -vvv -d ::0604": "0000:15:00.0 PCI bridge\n\tCapabilities: <access denied>\n"},
          "unknown", "only to root"),
    Case("pci-iommu", "ndv5", METAL | {"/sys/kernel/iommu_groups/18/type": "DMA-FQ"}, "warning", "(type DMA-FQ)"),
    Case("gdr-module", "ndv5", {"/proc/modules": "nvidia 1 0 - Live 0x0",
          "/proc/driver/nvidia/version": "NVRM version: NVIDIA UNIX "
          "x86_64 Kernel Module  535.161.08"}, "error", "the driver is not the open one"),
    Case("gdr-module", "ndv5", {"/proc/modules": "nvidia 1 0 - Live 0x0", f"{SYS}/kernel/osrelease": "5.4.0-azure"}, "error",
          "kernel 5.4 is older than 5.12"),
    Case("gdrcopy", "ndv5", GDRCOPY | {"/proc/modules": "nvidia 1 0 - Live 0x0\nnvidia_peermem 1 0 - Live 0x0"}, "warning",
          "gdrdrv is not"),
    Case("dns-own-name", "ndv5", {"getent ahosts node17": "127.0.1.1       STREAM node17\n127.0.1.1       DGRAM\n"}, "warning",
          "node17 is 127.0.1.1: ranks that look up"),
    Case("dns-own-name", "ndv5", {"getent ahosts node17": 2}, "warning", "node17 has no address"),
    Case("dns-own-name", "ndv5", {"getent ahosts node17": HANGS}, "unknown", "no answer within", also=("dns-back",)),
    Case("dns-back", "ndv5", {"getent hosts 10.0.0.17": "10.0.0.17  node18.cluster.internal\n"}, "warning", "which is node18"),
    Case("clock-sync", "ndv5", CLOCKS, "warning", "chrony follows no other clock"),
    Case("clock-sync", "ndv5", {"chronyc -c tracking": ("0.000012345", "-4.2")}, "warning", "chrony keeps it, 4.2 s off"),
    Case("clock-sync", "ndv5", {"chronyc -c tracking": None, "timedatectl show": "NTPSynchronized=no\n"}, "warning",
          "timedatectl"),
    Case("clock-sync", "ndv5", {"chronyc -c tracking": None}, "unknown", "no time synchronisation program"),
    Case("firewall", "ndv5", {"/etc/ufw/ufw.conf": "ENABLED=yes"}, "warning", "ufw: is on"),
    Case("firewall", "ndv5", process(70, "firewalld", "S", 1, 0), "warning", "firewalld: is on"),
    Case("firewall", "ndv5", {"nft list ruleset": ("policy accept", "policy drop")}, "warning", "inet filter input: turns away"),
    *(Case("firewall", "ndv5", {"nft list ruleset": f"table ip filter {{\n\tchain INPUT {{\n\t\ttype filter hook input priority "
            f"filter; policy accept;\n\t\tct state related,established counter packets 1 bytes 2 accept\n\t\tiifname \"lo\" "
            f"accept\n\t\ttcp dport 22 counter packets 0 bytes 0 accept\n\t\t{rule}\n\t}}\n}}\n"}, "warning",
            "ip filter INPUT: turns away arriving packets") for rule in (
        "counter packets 0 bytes 0 reject with icmp type host-prohibited", "reject with icmpx admin-prohibited", "counter drop",
        'log prefix "IN " level info drop', 'counter packets 0 bytes 0 xt target "REJECT"', 'drop comment "the rest"',
        "counter packets 9 bytes 9 jump RH-INPUT\n\t}\n\tchain RH-INPUT {\n\t\ttcp dport 22 accept\n\t\treject",
        "jump zones\n\t\treject\n\t}\n\tchain zones {\n\t\tgoto public\n\t}\n\tchain public {\n\t\ttcp dport 22 accept")),
    Case("firewall", "ndv5", {"nft list ruleset": 1}, "unknown", "nft exited with 1"),
    Case("ethernet-link", "ethernet", {f"{NET}/eno2/operstate": "down"}, "warning", "eno2: down, 25 Gb/s; it had a link"),
    Case("ethernet-link", "ethernet", {f"{NET}/eno2/duplex": "half"}, "warning", "half duplex"),
    Case("ethernet-speed", "ethernet", {f"{NET}/eno3/speed": "1000"}, "warning",
          "eno3: 1 Gb/s; 2 of 3 with driver bnxt_en have 25"),
    Case("interface-mtu", "ethernet", {f"{NET}/eno3/mtu": "9000"}, "warning",
          "eno3: MTU 9000; others with driver bnxt_en have 1500"),
    Case("limit-memlock", "ndv5", resource_limit("locked memory", 65536, 65536), "error", "64 KiB; adapters for RDMA"),
    Case("limit-nofile", "ndv5", resource_limit("open files", 1024, 65536), "warning", "1024 of 65536"),
    Case("limit-nofile", "ndv5", resource_limit("open files", 1024, 4096), "error", "1024 of 4096"),
    Case("limit-stack", "ndv5", resource_limit("stack size", "unlimited", "unlimited"), "warning",
          "unlimited: threads then get 2 MiB"),
    Case("limit-processes", "ndv5", resource_limit("processes", 4096, 4096), "warning", "4096 of 4096"),
    Case("cgroup-memory", "ndv5", JOB | {f"{UNIT}/memory.max": "500000000000"}, "error",
          "grants 466 GiB, the job asked for 879 GiB"),
    Case("cgroup-memory", "ndv5", V1 | {"/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.usage_in_bytes": "499000000000"},
         "warning", "465 GiB of 466 GiB are used"),
    Case("cgroup-oom", "ndv5", {f"{UNIT}/memory.events.local": "oom 3\noom_kill 3"}, "warning",
          "3 processes were killed for memory"),
    Case("cgroup-oom", "ndv5", V1 | {"/sys/fs/cgroup/memory/slurm/uid_0/job_7/memory.oom_control": "oom_kill 2"}, "warning",
          "2 processes"),
    Case("cgroup-cpus", "ndv5", JOB | {"/proc/self/status": ("0-95", "0-11")}, "error",
          "12 processors may be used, the job asked for 96"),
    Case("cgroup-cpus", "ndv5", {f"{UNIT}/cpu.max": "400000 100000", f"{UNIT}/cpu.stat": "nr_periods 100\nnr_throttled 60"},
         "warning", "the time of 4 processors was used up in 60%"),
    Case("cgroup-pids", "ndv5", {f"{UNIT}/pids.max": "512"}, "warning", "512 processes"),
)
