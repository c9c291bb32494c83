"""Writes the GPU part of every tree, ``files-gpu.toml`` and ``commands-gpu.json``: ``python -m tests.machines.rebuild_gpu``.

Nothing here was recorded on such a machine. Forms of the answers are those of published ones: ``nvidia-smi -q -x`` as in the test
data of influxdata/telegraf (A100-SXM4, driver 535; RTX PRO 6000 Blackwell, driver 590), ``nvlink -s`` and ``-e`` as in stas00's
ml-engineering and in published node reports (H100, H200, B300), ``topo -m`` likewise, ``nvidia-imex-ctl -N`` as in AWS
ParallelCluster's tutorial for p6e-gb200. Addresses: azhpc-images' topology files (ND), aws-ofi-nccl's and published NCCL logs
(p4d, p5), published GB200 reports. Serial numbers, UUIDs and the addresses of the NVSwitches on AWS are made up.
"""

from __future__ import annotations

import json
import uuid
from pathlib import Path
from xml.sax.saxutils import escape

from tests.machines.gpu_kinds import KINDS, Kind

HERE = Path(__file__).parent
REASONS = ("gpu_idle", "applications_clocks_setting", "sw_power_cap", "hw_slowdown", "hw_thermal_slowdown",
           "hw_power_brake_slowdown", "sync_boost", "sw_thermal_slowdown", "display_clocks_setting")


WAYS = """
Legend:

  X    = Self
  SYS  = Connection traversing PCIe as well as the SMP interconnect between NUMA nodes (e.g., QPI/UPI)
  NODE = Connection traversing PCIe as well as the interconnect between PCIe Host Bridges within a NUMA node
  PHB  = Connection traversing PCIe as well as a PCIe Host Bridge (typically the CPU)
  PXB  = Connection traversing multiple PCIe bridges (without traversing the PCIe Host Bridge)
  PIX  = Connection traversing at most a single PCIe bridge
  NV#  = Connection traversing a bonded set of # NVLinks
"""
STATES = """

Legend:

  X    = Self
  OK   = Status Ok
  CNS  = Chipset not supported
  GNS  = GPU not supported
  TNS  = Topology not supported
  NS   = Not supported
  U    = Unknown
"""
IMEX = """Connectivity Table Legend:
I - Invalid - Node wasn't reachable, no connection status available
N - Never Connected
R - Recovering - Connection was lost, but clean up has not yet been triggered.
D - Disconnected - Connection was lost, and clean up has been triggreed.
A - Authenticating - If GSSAPI enabled, client has initiated mutual authentication.
!V! - Version mismatch, communication disabled.
!M! - Node map mismatch, communication disabled.
C - Connected - Ready for operation

"""
DEVICE = """{bus} 3D controller: NVIDIA Corporation Device {device} (rev a1)
\tCapabilities: [60] Express (v2) Endpoint, MSI 00
\t\tDevCap:\tMaxPayload 256 bytes, PhantFunc 0, Latency L0s unlimited, L1 <64us
\t\tDevCtl:\tCorrErr- NonFatalErr- FatalErr- UnsupReq-
\t\t\tRlxdOrd+ ExtTag+ PhantFunc- AuxPwr- NoSnoop- FLReset-
\t\t\tMaxPayload 256 bytes, MaxReadReq 512 bytes
"""


def commands(kind: Kind) -> dict[str, dict[str, object]]:
    """``commands-gpu.json``."""
    gpus = range(len(kind.buses))
    bus = [smi_address(kind, gpu) for gpu in gpus]
    listing = "".join(f"GPU {gpu}: {kind.product} (UUID: {uid(kind, gpu)})\n" for gpu in gpus)
    csv = "\n".join
    load = ("index,pci.bus_id,clocks.current.sm,clocks.max.sm,clocks.current.memory,power.draw,temperature.gpu,utilization.gpu,"
            "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max")
    answers = {
        "nvidia-smi -q -x": xml(kind),
        "nvidia-smi --list-gpus": listing,
        "nvidia-smi nvlink -s": "".join(
            f"{line}\n" + "".join(f"\t Link {link}: {kind.rate}\n"
                                  for link in range(kind.links)) for line in listing.splitlines()),
        "nvidia-smi nvlink -e": "".join(f"{line}\n" + "".join(link_errors(kind, link) for link in range(kind.links))
                                        for line in listing.splitlines()),
        "nvidia-smi topo -m": topology(kind),
        "nvidia-smi topo -p2p n": peers(kind),
        "nvidia-smi --query-gpu=index,pci.bus_id,memory.used --format=csv,noheader,nounits":
            csv(f"{gpu}, {bus[gpu]}, 4" for gpu in gpus) + "\n",
        "nvidia-smi --query-compute-apps=gpu_bus_id,pid,process_name --format=csv,noheader,nounits": "",
        f"nvidia-smi --query-gpu={load},clocks_event_reasons.active --format=csv,noheader,nounits": csv(
            f"{gpu}, {bus[gpu]}, {kind.clocks[0]}, {kind.clocks[0]}, {kind.clocks[1]}, 71.50, 31, 0, {kind.pcie}, {kind.pcie}, "
            "16, 16, 0x0000000000000000" for gpu in gpus) + "\n",
        "lspci -D -vv -d 10de:": lspci(kind),
    }
    if kind.switches:
        answers["systemctl is-active nvidia-fabricmanager"] = "active\n"
    if kind.cluster:
        answers["nvidia-imex-ctl -H -N"] = imex()
    return {argv: {"code": 0, "out": out} for argv, out in answers.items()}


def files(kind: Kind) -> dict[str, str]:
    """``files-gpu.toml``."""
    each, nodes = "{" + ",".join(kind.buses) + "}", "{" + ",".join(map(str, kind.numa)) + "}"
    speed = {4: "16.0", 5: "32.0"}[kind.pcie]
    found = {f"/sys/bus/pci/devices/{each}/{name}": text for name, text in {
        "vendor": "0x10de", "device": kind.device, "class": "0x030200", "current_link_speed": f"{speed} GT/s PCIe",
        "max_link_speed": f"{speed} GT/s PCIe", "current_link_width": "16", "max_link_width": "16", "numa_node": nodes}.items()}
    if kind.switches:
        bridges = "{" + ",".join(kind.switches) + "}"
        found |= {f"/sys/bus/pci/devices/{bridges}/{name}": text for name, text in
                  {"vendor": "0x10de", "device": kind.switch_device, "class": "0x068000"}.items()}
        found[f"/dev/nvidia-nvswitch{{0..{len(kind.switches) - 1}}}"] = ""
    machine = kind.library.partition("-")[0]
    open_module = "Open Kernel Module" if kind.hopper else "Kernel Module"
    return found | {
        f"/dev/nvidia{{0..{len(kind.buses) - 1}}}": "",
        "/dev/nvidia{ctl,-uvm,-uvm-tools,-modeset}": "",
        "/proc/driver/nvidia/version": f"NVRM version: NVIDIA UNIX {open_module} for {machine}  {kind.driver}  Release Build",
        "/sys/module/nvidia/version": kind.driver,
        f"/proc/driver/nvidia/gpus/{each}/information": f"Model: \t {kind.product}\nBus Location: \t {each}\nGPU Excluded:\t No",
        f"/usr/lib/{kind.library}/libnvidia-ml.so.{kind.driver}": "",
        "/proc/2211/comm": "slurmd",
        "/proc/uptime": "864000.00 80000000.00",
        "/dev/kmsg": kernel_log(kind),
        **({"/dev/nvidia-caps-imex-channels/channel0": ""} if kind.cluster else {}),
    }


def kernel_log(kind: Kind) -> str:
    """As a boot leaves it: the link's speed is lower than it could be, because it rests; a program was stopped an hour ago."""
    lines = [(12.1, f"nvidia {bus}: enabling device (0000 -> 0002)") for bus in kind.buses]
    lines += [(12.2, f"pci {bus}: 63.008 Gb/s available PCIe bandwidth, limited by 2.5 GT/s PCIe x16 link at 0000:00:00.0 "
               "(capable of 504.112 Gb/s with 32.0 GT/s PCIe x16 link)") for bus in kind.buses[:1]]
    lines += [(12.9, f"NVRM: loading NVIDIA UNIX Kernel Module  {kind.driver}")]
    lines += [(860400.5,
               f"NVRM: Xid (PCI:{kind.buses[0][:-2]}): 13, pid=4711, name=python, Graphics SM Warp Exception on (GPC 0, TPC 1)")]
    return "".join(f"4,{number},{int(at * 1e6)},-;{text}\n" for number, (at, text) in enumerate(lines, 900))


def smi_address(kind: Kind, gpu: int) -> str:
    return f"0000{kind.buses[gpu].upper()}"


def uid(kind: Kind, gpu: int) -> str:
    return f"GPU-{uuid.uuid5(uuid.NAMESPACE_DNS, f'{kind.name}-{gpu}')}"


def link_errors(kind: Kind, link: int) -> str:
    names = ("Replay Errors", "Recovery Errors", "CRC Errors")
    if kind.cluster:  # Blackwell's names
        names = ("Malformed packet Errors", "Buffer overrun Errors", "Rx Errors", "Rx remote Errors", "Rx General Errors",
                 "Local link integrity Errors", "Tx discards", "Link recovery successful events", "Link recovery failed events",
                 "Total link recovery events", "Effective Errors", "Symbol Errors")
    fec = f"\t Link {link}: FEC Errors - 0: 8123947281\n\t Link {link}: FEC Errors - 1: 12\n" if kind.cluster else ""
    return "".join(f"\t Link {link}: {name}: 0\n" for name in names) + fec + "\n"


def topology(kind: Kind) -> str:
    count, nics = len(kind.buses), kind.nics
    columns = [f"GPU{gpu}" for gpu in range(count)] + [f"NIC{nic}" for nic in range(len(nics))]
    rows = ["\t" + "\t".join([*columns, "CPU Affinity", "NUMA Affinity", "GPU NUMA ID"])]
    for gpu in range(count):
        between = [" X " if other == gpu else f"NV{kind.links}" for other in range(count)]
        near = ["PXB" if nic in kind.rails.get(gpu, ()) else "NODE" if numa == kind.numa[gpu] else "SYS" for nic,
                (_, numa) in enumerate(nics)]
        rows.append("\t".join([f"GPU{gpu}", *between, *near, f"{24 * kind.numa[gpu]}-{24 * kind.numa[gpu] + 23}",
                               str(kind.numa[gpu]), "\tN/A"]))
    for nic, (_, numa) in enumerate(nics):
        ways = ["PXB" if nic in kind.rails.get(gpu, ()) else "NODE" if numa == kind.numa[gpu] else "SYS" for gpu in range(count)]
        others = [" X " if other == nic else "NODE" if nics[other][1] == numa else "SYS" for other in range(len(nics))]
        rows.append("\t".join([f"NIC{nic}", *ways, *others, "\t\t\t"]))
    return "\n".join(rows) + "\n" + WAYS + "\nNIC Legend:\n\n" + "".join(f"  NIC{nic}: {name}\n" for nic,
                                                                           (name, _) in enumerate(nics)) + "\n"


def peers(kind: Kind) -> str:
    count = len(kind.buses)
    rows = [" \t" + "\t".join(f"GPU{gpu}" for gpu in range(count))]
    rows += [f" GPU{gpu}\t" + "\t".join("X" if other == gpu else "OK" for other in range(count)) for gpu in range(count)]
    return "\n".join(rows) + STATES


def lspci(kind: Kind) -> str:
    blocks = [DEVICE.format(bus=bus, device=kind.device[2:]) for bus in kind.buses]
    blocks += [f"{bus} Bridge: NVIDIA Corporation Device {kind.switch_device[2:]} (rev a1)\n" for bus in kind.switches]
    return "\n".join(blocks)


def imex(nodes: int = 18) -> str:
    listed = "".join(f"Node #{node:<3} - 10.0.4.{node + 10:<11} - READY                - Version: 570.158\n"
                     for node in range(nodes))
    head = " Nodes From\\To  " + "".join(f"{node:<4}" for node in range(nodes)) + "\n"
    table = "".join(f"{node:>8}        " + "C   " * nodes + "\n" for node in range(nodes))
    return f"{IMEX}5/12/2026 06:08:10.580\nNodes:\n{listed}\n{head}{table}\nDomain State: UP\n"


def xml(kind: Kind) -> str:
    version = 12 if kind.driver < "56" else 13
    gpus = "".join(gpu_xml(kind, gpu, version) for gpu in range(len(kind.buses)))
    cuda = {"535": "12.2", "550": "12.4", "570": "12.8"}[kind.driver[:3]]
    return (f'<?xml version="1.0" ?>\n<!DOCTYPE nvidia_smi_log SYSTEM "nvsmi_device_v{version}.dtd">\n<nvidia_smi_log>\n'
            f"\t<timestamp>Mon Oct  5 10:00:00 2026</timestamp>\n\t<driver_version>{kind.driver}</driver_version>\n"
            f"\t<cuda_version>{cuda}</cuda_version>\n\t<attached_gpus>{len(kind.buses)}</attached_gpus>\n{gpus}</nvidia_smi_log>\n")


def gpu_xml(kind: Kind, gpu: int, version: int) -> str:
    bus = smi_address(kind, gpu)
    return f'\t<gpu id="{bus}">\n{elements(content(kind, gpu, bus, version), 2)}\t</gpu>\n'


def content(kind: Kind, gpu: int, bus: str, version: int) -> dict[str, object]:
    """Nested elements, in nvidia-smi's order; those that no check reads are left out."""
    new = version > 12
    unsaid = "Requested functionality has been deprecated"
    counts: dict[str, object] = {"sram_correctable": 0, "sram_uncorrectable": 0, "dram_correctable": 0, "dram_uncorrectable": 0}
    lifetime = dict(counts)
    if new:
        counts = {"sram_correctable": 0, "sram_uncorrectable_parity": 0, "sram_uncorrectable_secded": 0, "dram_correctable": 0,
                  "dram_uncorrectable": 0}
        lifetime = counts | {"sram_threshold_exceeded": "No"}
    limits: dict[str, object] = {"gpu_temp": "31 C", "gpu_temp_tlimit": "N/A", "gpu_temp_max_threshold": "92 C",
                                 "gpu_temp_slow_threshold": "89 C", "gpu_temp_max_gpu_threshold": "85 C"}
    if kind.hopper:
        limits = {"gpu_temp": "31 C", "gpu_temp_tlimit": "56 C", "gpu_temp_max_tlimit_threshold": "-8 C",
                  "gpu_temp_slow_tlimit_threshold": "-2 C", "gpu_temp_max_gpu_tlimit_threshold": "0 C"}
    fabric: dict[str, object] = {"state": "N/A", "status": "N/A"}
    if kind.hopper:
        fabric = {"state": "Completed", "status": "Success"}
        if kind.driver >= "55":
            fabric |= {"cliqueId": 1 if kind.cluster else 0, "clusterUuid": kind.cluster
                       or "00000000-0000-0000-0000-000000000000"}
        if new:
            fabric["health"] = {"summary": "Healthy", "bandwidth": "Full", "route_recovery_in_progress": "False",
                                "route_unhealthy": "False", "access_timeout_recovery": "False"}
    clocks = {"graphics_clock": f"{kind.clocks[0]} MHz", "mem_clock": f"{kind.clocks[1]} MHz"}
    power = f"{kind.power}.00 W"
    return {
        "product_name": kind.product,
        "product_architecture": "Blackwell" if kind.cluster else "Hopper" if kind.hopper else "Ampere",
        "persistence_mode": "Enabled",
        "mig_mode": {"current_mig": "Disabled", "pending_mig": "Disabled"},
        "serial": 1650000000000 + int(uid(kind, gpu)[4:10], 16),
        "uuid": uid(kind, gpu),
        "minor_number": gpu,
        "vbios_version": "92.00.45.00.06" if not kind.hopper else "97.00.82.00.30" if kind.cluster else "96.00.74.00.01",
        "inforom_version": {"img_version": "G506.0200.00.04" if not kind.hopper else "G520.0200.00.05", "ecc_object": "6.16"},
        **({"gpu_recovery_action": "None"} if new else {}),
        "gsp_firmware_version": kind.driver,
        **({} if new else {"gpu_reset_status": {"reset_required": "No", "drain_and_reset_recommended": "No"}}),
        "pci": {
            "pci_device_id": f"{kind.device[2:].upper()}10DE",
            "pci_bus_id": bus,
            "pci_gpu_link_info": {
                "pcie_gen": {"max_link_gen": kind.pcie, "current_link_gen": kind.pcie, "device_current_link_gen": kind.pcie,
                             "max_device_link_gen": kind.pcie, "max_host_link_gen": kind.pcie},
                "link_widths": {"max_link_width": "16x", "current_link_width": "16x"}},
            "replay_counter": 0, "replay_rollover_counter": 0},
        "performance_state": "P0",
        "clocks_event_reasons": {f"clocks_event_reason_{name}": "Active" if name == "gpu_idle" else "Not Active"
                                 for name in REASONS},
        "fb_memory_usage": {"total": f"{kind.memory} MiB", "reserved": "551 MiB", "used": "4 MiB",
                            "free": f"{kind.memory - 555} MiB"},
        "compute_mode": "Default",
        "utilization": {"gpu_util": "0 %", "memory_util": "0 %"},
        "ecc_mode": {"current_ecc": "Enabled", "pending_ecc": "Enabled"},
        "ecc_errors": {"volatile": counts, "aggregate": lifetime, **(
            {"channel_repair_pending": "No", "tpc_repair_pending": "No", "unrepairable_memory": "No"} if new else {})},
        "retired_pages": {
            "multiple_single_bit_retirement": {"retired_count": "N/A", "retired_pagelist": "N/A"},
            "double_bit_retirement": {"retired_count": "N/A", "retired_pagelist": "N/A"},
            "pending_blacklist": "N/A", "pending_retirement": "N/A"},
        "remapped_rows": {
            "remapped_row_corr": 0, "remapped_row_unc": 0, "remapped_row_pending": "No", "remapped_row_failure": "No",
            "row_remapper_histogram": {
                "row_remapper_histogram_max": "640 bank(s)", "row_remapper_histogram_high": "0 bank(s)",
                "row_remapper_histogram_partial": "0 bank(s)", "row_remapper_histogram_low": "0 bank(s)",
                "row_remapper_histogram_none": "0 bank(s)"}},
        "temperature": limits | {"memory_temp": "40 C", **({"gpu_temp_max_mem_tlimit_threshold": "0 C"} if kind.hopper
                                                           else {"gpu_temp_max_mem_threshold": "95 C"})},
        "gpu_power_readings": {"power_draw": "71.50 W", "current_power_limit": power, "requested_power_limit": power,
                               "default_power_limit": power, "min_power_limit": "100.00 W", "max_power_limit": power},
        "clocks": {"sm_clock": clocks["graphics_clock"], **clocks},
        "applications_clocks": {name: unsaid if new else text for name, text in clocks.items()},
        "default_applications_clocks": {name: unsaid if new else text for name, text in clocks.items()},
        "max_clocks": {"sm_clock": clocks["graphics_clock"], **clocks},
        "fabric": fabric,
        "processes": {},
    }


def elements(tree: dict[str, object], depth: int) -> str:
    tabs, out = "\t" * depth, ""
    for name, value in tree.items():
        if isinstance(value, dict):
            out += f"{tabs}<{name}>\n{elements(value, depth + 1)}{tabs}</{name}>\n"
        else:
            out += f"{tabs}<{name}>{escape(str(value))}</{name}>\n"
    return out


def render(kind: Kind) -> dict[str, str]:
    """The two files of a kind, by name."""
    head = "# GPUs: rebuilt from documentation by tests/machines/rebuild_gpu.py, which names its sources.\n"
    return {
        "files-gpu.toml": head + "".join(f"{json.dumps(path)} = {json.dumps(text)}\n" for path, text in files(kind).items()),
        "commands-gpu.json": json.dumps(commands(kind), indent=1) + "\n",
    }


if __name__ == "__main__":
    for each in KINDS:
        for name, text in render(each).items():
            (HERE / each.name / name).write_text(text, encoding="utf-8")
