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
from dataclasses import dataclass, field
from pathlib import Path

from jinja2 import Environment, FileSystemLoader, StrictUndefined

HERE = Path(__file__).parent
FORMS = HERE / "nvidia"  # the answer of nvidia-smi -q -x, and the legends of others
TEMPLATES = Environment(loader=FileSystemLoader(FORMS), trim_blocks=True, keep_trailing_newline=True, undefined=StrictUndefined)


@dataclass(frozen=True)
class Kind:
    """One machine. ``rails``: NICs on a GPU's own PCIe switch, by GPU; empty where the switches are hidden."""

    name: str
    product: str
    device: str
    driver: str
    buses: tuple[str, ...]
    numa: tuple[int, ...]
    memory: int
    links: int
    rate: str
    pcie: int
    clocks: tuple[int, int]
    power: int
    nics: tuple[tuple[str, int], ...]  # name, NUMA node
    switches: tuple[str, ...] = ()
    switch_device: str = ""
    hopper: bool = True
    cluster: str = ""
    library: str = "x86_64-linux-gnu"
    rails: dict[int, tuple[int, ...]] = field(default_factory=dict)


def azure(domains: str) -> tuple[str, ...]:
    return tuple(f"00{domain}:00:00.0" for domain in domains.split())


AN0 = (("mlx5_an0", 0),)
KINDS = (
    Kind("ndv4", "NVIDIA A100-SXM4-40GB", "0x20b0", "535.161.08", azure("01 02 03 04 0b 0c 0d 0e"), (1, 1, 0, 0, 3, 3, 2, 2),
         40960,
         12, "25 GB/s", 4, (1410, 1215), 400,
         tuple((f"mlx5_ib{index}", numa) for index, numa in enumerate((1, 1, 0, 0, 3, 3, 2, 2))),
         azure("05 06 07 08 09 0a"), "0x1af1", hopper=False),
    Kind("ndv5", "NVIDIA H100 80GB HBM3", "0x2330", "535.161.08", azure("01 02 03 08 09 0a 0b 0c"), (0, 0, 0, 0, 1, 1, 1, 1),
         81559,
         18, "26.562 GB/s", 5, (1980, 2619), 700,
         tuple((f"mlx5_ib{index}", index // 4) for index in range(8)) + AN0, azure("04 05 06 07"), "0x22a3"),
    Kind("ndh200v5", "NVIDIA H200", "0x2335", "550.90.07", azure("01 02 03 08 09 0a 0b 0c"), (0, 0, 0, 0, 1, 1, 1, 1), 143771,
         18, "26.562 GB/s", 5, (1980, 3201), 700,
         tuple((f"mlx5_ib{index}", index // 4) for index in range(8)) + AN0, azure("04 05 06 07"), "0x22a3"),
    Kind("p4d", "NVIDIA A100-SXM4-40GB", "0x20b0", "535.161.08",
         tuple(f"0000:{bus}:1{slot}.0" for bus in ("10", "20", "90", "a0") for slot in "cd"), (0, 0, 0, 0, 1, 1, 1, 1), 40960,
         12, "25 GB/s", 4, (1410, 1215), 400,
         (("rdmap16s27", 0), ("rdmap32s27", 0), ("rdmap144s27", 1), ("rdmap160s27", 1)),
         tuple(f"0000:c0:1{slot}.0" for slot in "89abcd"), "0x1af1", hopper=False),
    Kind("p5", "NVIDIA H100 80GB HBM3", "0x2330", "550.90.07",
         tuple(f"0000:{bus}:00.0" for bus in ("53", "64", "75", "86", "97", "a8", "b9", "ca")), (0, 0, 0, 0, 1, 1, 1, 1), 81559,
         18, "26.562 GB/s", 5, (1980, 2619), 700,
         tuple((f"rdmap{79 + 17 * (index // 4) + index % 4}s0", index // 16) for index in range(32)),
         tuple(f"0000:{bus}:00.0" for bus in ("d8", "d9", "da", "db")), "0x22a3",
         rails={gpu: tuple(range(4 * gpu, 4 * gpu + 4)) for gpu in range(8)}),
    Kind("gb200", "NVIDIA GB200", "0x2941", "570.158.01", ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"),
         (0, 0, 1, 1), 189471, 18, "53.125 GB/s", 5, (2062, 3996), 1200,
         (("mlx5_ib0", 0), ("mlx5_ib1", 0), ("mlx5_ib2", 1), ("mlx5_ib3", 1)),
         cluster="7f3c2a10-5b4e-4d6a-9c1e-2b8f0e6d4a91", library="aarch64-linux-gnu"),
)


def form(name: str) -> str:
    return (FORMS / name).read_text(encoding="utf-8")


def commands(kind: Kind) -> dict[str, dict[str, object]]:
    """``commands-gpu.json``."""
    gpus = range(len(kind.buses))
    bus = [smi_address(kind, gpu) for gpu in gpus]
    listing = "".join(f"GPU {gpu}: {kind.product} (UUID: {uid(kind, gpu)})\n" for gpu in gpus)
    csv = "\n".join
    load = ("index,pci.bus_id,clocks.current.sm,clocks.max.sm,power.draw,temperature.gpu,utilization.gpu,"
            "pcie.link.gen.current,pcie.link.gen.max,pcie.link.width.current,pcie.link.width.max")
    answers = {
        "nvidia-smi -q -x": xml(kind),
        "nvidia-smi --list-gpus": listing,
        "nvidia-smi nvlink -s": "".join(f"{line}\n" + "".join(f"\t Link {link}: {kind.rate}\n" for link in range(kind.links))
                                        for line in listing.splitlines()),
        "nvidia-smi nvlink -e": "".join(f"{line}\n" + "".join(link_errors(kind, link) for link in range(kind.links))
                                        for line in listing.splitlines()),
        "nvidia-smi topo -m": topology(kind),
        "nvidia-smi topo -p2p n": peers(kind),
        "nvidia-smi --query-gpu=index,pci.bus_id,memory.used --format=csv,noheader,nounits":
            csv(f"{gpu}, {bus[gpu]}, 4" for gpu in gpus) + "\n",
        "nvidia-smi --query-compute-apps=gpu_bus_id,pid,process_name --format=csv,noheader,nounits": "",
        f"nvidia-smi --query-gpu={load},clocks_event_reasons.active --format=csv,noheader,nounits": csv(
            f"{gpu}, {bus[gpu]}, {kind.clocks[0]}, {kind.clocks[0]}, 71.50, 31, 0, {kind.pcie}, {kind.pcie}, "
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
    return "\n".join(rows) + "\n" + form("topology.txt") + "\nNIC Legend:\n\n" + "".join(f"  NIC{nic}: {name}\n" for nic,
                                                                           (name, _) in enumerate(nics)) + "\n"


def peers(kind: Kind) -> str:
    count = len(kind.buses)
    rows = [" \t" + "\t".join(f"GPU{gpu}" for gpu in range(count))]
    rows += [f" GPU{gpu}\t" + "\t".join("X" if other == gpu else "OK" for other in range(count)) for gpu in range(count)]
    return "\n".join(rows) + form("peers.txt")


def lspci(kind: Kind) -> str:
    blocks = [form("device.txt").format(bus=bus, device=kind.device[2:]) for bus in kind.buses]
    blocks += [f"{bus} Bridge: NVIDIA Corporation Device {kind.switch_device[2:]} (rev a1)\n" for bus in kind.switches]
    return "\n".join(blocks)


def imex(nodes: int = 18) -> str:
    listed = "".join(f"Node #{node:<3} - 10.0.4.{node + 10:<11} - READY                - Version: 570.158\n"
                     for node in range(nodes))
    head = " Nodes From\\To  " + "".join(f"{node:<4}" for node in range(nodes)) + "\n"
    table = "".join(f"{node:>8}        " + "C   " * nodes + "\n" for node in range(nodes))
    return f"{form('imex.txt')}5/12/2026 06:08:10.580\nNodes:\n{listed}\n{head}{table}\nDomain State: UP\n"


def xml(kind: Kind) -> str:
    """Elements in nvidia-smi's order; those that no check reads are left out."""
    gpus = range(len(kind.buses))
    return TEMPLATES.get_template("nvidia-smi.xml.j2").render(
        kind=kind, gpus=gpus, bus=[smi_address(kind, gpu) for gpu in gpus], uid=[uid(kind, gpu) for gpu in gpus],
        serial=lambda uuid: 1650000000000 + int(uuid[4:10], 16))


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
