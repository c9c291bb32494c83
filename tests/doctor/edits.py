"""What can be done to a tree: edits of its files and of the answers of programs, as ``broken`` takes them."""

import functools
import json
import re
from collections.abc import Iterable, Mapping, Sequence
from typing import Any
from xml.etree import ElementTree

from machines.tree import Edit, tree
from tables import table

from hpc_mp.cluster.node.counters import KEPT, read_counters
from hpc_mp.cluster.node.source import SHARED

SMI = "nvidia-smi -q -x"
LINKS, MATRIX, PEERS = "nvidia-smi nvlink -s", "nvidia-smi topo -m", "nvidia-smi topo -p2p n"
LIST = "nvidia-smi --list-gpus"
APPS = "nvidia-smi --query-compute-apps=gpu_bus_id,pid,process_name --format=csv,noheader,nounits"
USED = "nvidia-smi --query-gpu=index,pci.bus_id,memory.used --format=csv,noheader,nounits"
LIMIT = "Max {:<26}{:<21}{:<21}{}"
LIMITS = {"stack size": (8388608, "unlimited"), "processes": (7400000, 7400000), "open files": (1048576, 1048576),
          "locked memory": ("unlimited", "unlimited")}
RULES = table(__file__, "edits.toml", "rules")
# Errors as GPUs before Ampere count them: a P100 (no shared memory of textures, no CBU) and a V100
P100 = ("device_memory", "register_file", "l1_cache", "l2_cache", "texture_memory", "total")
V100 = (*P100, "texture_shm", "cbu")
SRAM = ("sram_correctable", "sram_uncorrectable", "dram_correctable", "dram_uncorrectable")
DARK = "NVML: Unable to retrieve NVLink information as all links are inActive"


def earlier(kind: str) -> dict[str, Edit]:
    """The counters of this tree were the same an hour ago."""
    reading = {"at": up(kind) - 3600, "values": read_counters(tree(kind))}
    boot = tree(kind).text("/proc/sys/kernel/random/boot_id")
    return {f"{SHARED}/{KEPT}": json.dumps({"boot": boot, "readings": [reading]})}


def up(kind: str) -> float:
    return float(tree(kind).text("/proc/uptime").split()[0])


def resource_limit(name: str, soft: object, hard: object) -> dict[str, Edit]:
    rows = LIMITS | {name: (soft, hard)}
    return {"/proc/self/limits": "\n".join(LIMIT.format(each, *map(str, pair), "") for each, pair in rows.items())}


def process(pid: object, name: str, state: str, parent: int, user: int, born: int = 100) -> dict[str, Edit]:
    return {f"/proc/{pid}/stat": f"{pid} ({name}) {state} {parent} 1 1 0 -1 0 0 0 0 0 0 0 0 0 20 0 1 0 {born} 0",
            f"/proc/{pid}/status": f"Name:\t{name}\nUid:\t{user}\t0\t0\t0\nvoluntary_ctxt_switches:\t9",
            f"/proc/{pid}/comm": name, f"/proc/{pid}/wchan": "rpc_wait_bit_killable" if state == "D" else "0"}


def logged(line: str, ago: float = 60.0, kind: str = "ndv5") -> dict[str, Edit]:
    return {"/dev/kmsg": f"6,1,0,-;Linux version 6.8.0\n4,901,{(up(kind) - ago) * 1e6:.0f},-;{line}\n"
                         " SUBSYSTEM=pci\n DEVICE=+pci:0001:00:00.0\n"}


def firewall(policy: str, *rules: str) -> dict[str, Edit]:
    return {"nft list ruleset": RULES % (policy, "\n\t\t".join(rules))}


@functools.cache
def answer(kind: str, argv: str) -> str:
    return tree(kind).answer(argv.split())


def smi(kind: str, gpu: int | None, values: Mapping[str, str | None]) -> dict[str, Edit]:
    """nvidia-smi's answer with these values at one GPU (None: at all). A value None takes the element away."""
    document = ElementTree.fromstring(answer(kind, SMI))
    for index, element in enumerate(document.iter("gpu")):
        if gpu in (None, index):
            for path, text in values.items():
                _put(element, path.split("/"), text)
    return {SMI: ElementTree.tostring(document, encoding="unicode")}


def _put(element: Any, path: list[str], text: str | None) -> None:
    for name in path[:-1]:
        child = element.find(name)
        element = child if child is not None else ElementTree.SubElement(element, name)
    found = element.find(path[-1])
    if text is None:
        element.remove(found)
        return
    if found is None:
        found = ElementTree.SubElement(element, path[-1])
    for child in list(found):
        found.remove(child)
    found.text = text


def counted(kind: str, gpu: int, units: Sequence[str] = V100, **errors: int) -> dict[str, Edit]:
    """A GPU that counts errors by its units. ``errors``: such as ``volatile_double_bit_total``; all others are 0."""
    values: dict[str, str | None] = {f"ecc_errors/{since}/{name}": None for since in ("volatile", "aggregate") for name in SRAM}
    for since in ("volatile", "aggregate"):
        values |= {f"ecc_errors/{since}/{kind_}/{unit}": str(errors.get(f"{since}_{kind_}_{unit}", 0))
                   for kind_ in ("single_bit", "double_bit") for unit in units}
    return smi(kind, gpu, values)


def within(kind: str, changes: Mapping[str, tuple[str, str, str]]) -> dict[str, Edit]:
    """Answers that are changed, from old to new, in the line of a name and in those that are indented below it."""
    found: dict[str, Edit] = {}
    for argv, (name, old, new) in changes.items():
        text = answer(kind, argv)
        part = re.search(rf"^ ?{re.escape(name)}\b.*\n(\t.*\n)*", text, re.MULTILINE)
        assert part and old in part[0], (argv, name, old)
        found[argv] = text[:part.start()] + part[0].replace(old, new) + text[part.end():]
    return found


def dark(kind: str, gpus: Sequence[int], words: str = DARK) -> dict[str, Edit]:
    text = answer(kind, LINKS)
    for gpu in gpus:
        text = re.sub(rf"(^GPU {gpu}: .*\n)(\t.*\n)*", rf"\1{words}\n", text, flags=re.MULTILINE)
    return {LINKS: text}


def pairs(ways: Iterable[str]) -> dict[str, Edit]:
    """The matrix of GPUs that are joined so: a row for each."""
    rows = [row.split() for row in ways]
    names = [f"GPU{number}" for number in range(len(rows))]
    return {MATRIX: "\n".join("\t".join(cells) for cells in (
        ["", *names, "CPU Affinity"], *([name, *row, "0-31"] for name, row in zip(names, rows, strict=True))))}
