"""What ``nvidia-smi`` says of the GPUs: its whole answer in XML, one flat table of texts per GPU."""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from xml.etree import ElementTree

from hpc_mp.cluster.node.source import Unseen

QUERY = ("nvidia-smi", "-q", "-x")
_UNSAID = re.compile("|N/A|Not Supported|Not Available|Unknown|Insufficient Permissions|Requested functionality .* deprecated")
_FAILED = re.compile(r"ERR!|Unknown Error|GPU is lost.*", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?)", re.IGNORECASE)
_LONG = ("supported_clocks", "mig_devices", "accounted_processes", "processes")  # lists that are no facts about the GPU's health


@dataclass(frozen=True)
class Process:
    """A program that holds a GPU. ``memory`` is in MiB, None where the driver does not tell (in a container, say)."""

    pid: int
    kind: str
    name: str
    memory: float | None


@dataclass(frozen=True)
class Gpu:
    """One GPU.

    Attributes:
        index: nvidia-smi's, which is the order of the PCI bus.
        bus: its PCI address as the kernel writes it: ``0000:c6:00.0``.
        values: nvidia-smi's words by path, such as ``"ecc_mode/current_ecc": "Enabled"``.
        processes: those that hold it.
    """

    index: int
    bus: str
    values: Mapping[str, str] = field(default_factory=dict)
    processes: tuple[Process, ...] = ()

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.bus})"

    @property
    def name(self) -> str:
        return self.says("product_name") or "unknown GPU"

    def says(self, *paths: str) -> str | None:
        """The words at the first path that says something; drivers of different age name things differently."""
        words = (self.values.get(path, "").strip("[]") for path in paths)
        return next((text for text in words if not _UNSAID.fullmatch(text) and not _FAILED.fullmatch(text)), None)

    def number(self, *paths: str) -> float | None:
        """The number at the first path that has one, without its unit (MiB, W, C, MHz as nvidia-smi writes them)."""
        return next((value for path in paths if (value := _number(self.says(path))) is not None), None)

    def failed(self) -> tuple[str, ...]:
        """The paths where the driver got an error instead of a value."""
        return tuple(path for path, text in self.values.items() if _FAILED.fullmatch(text.strip("[]")))


@dataclass(frozen=True)
class Smi:
    """nvidia-smi's answer. ``attached`` is the number of GPUs it claims to see, ``driver`` its version."""

    driver: str
    cuda: str
    attached: int | None
    gpus: tuple[Gpu, ...]


def parse_smi(text: str) -> Smi:
    """Raises Unseen where ``text`` is not nvidia-smi's XML."""
    begin = text.find("<")
    end = text.rfind(">")  # a warning about a corrupt infoROM is written after the document
    try:
        root = ElementTree.fromstring(text[begin:end + 1])
    except ElementTree.ParseError as error:
        raise Unseen(f"nvidia-smi -q -x answered no XML ({error}): {text[:60]!r}") from None
    if root.tag != "nvidia_smi_log":
        raise Unseen(f"nvidia-smi -q -x answered XML of another kind: <{root.tag}>")
    attached = _number(root.findtext("attached_gpus"))
    return Smi(
        driver=root.findtext("driver_version", "").strip(),
        cuda=root.findtext("cuda_version", "").strip(),
        attached=None if attached is None else int(attached),
        gpus=tuple(_gpu(index, element) for index, element in enumerate(root.iter("gpu"))),
    )


def address(bus: str) -> str:
    """A PCI address as the kernel writes it: nvidia-smi's ``00000000:C6:00.0`` is ``0000:c6:00.0``."""
    domain, _, rest = bus.strip().lower().rpartition(":")[0].partition(":")
    tail = bus.strip().lower().rpartition(":")[2]
    try:
        return f"{int(domain, 16):04x}:{rest}:{tail}"
    except ValueError:
        return bus.strip().lower()


def _gpu(index: int, element: ElementTree.Element) -> Gpu:
    values = dict(_flat(element, ""))
    bus = values.get("pci/pci_bus_id") or element.get("id") or ""
    return Gpu(index, address(bus), values, tuple(_processes(element)))


def _flat(element: ElementTree.Element, prefix: str) -> Iterator[tuple[str, str]]:
    for child in element:
        if child.tag in _LONG:
            continue
        path = f"{prefix}{child.tag}"
        if len(child):
            yield from _flat(child, f"{path}/")
        else:
            yield path, (child.text or "").strip()


def _processes(element: ElementTree.Element) -> Iterator[Process]:
    for info in element.iterfind("processes/process_info"):
        pid = _number(info.findtext("pid"))
        if pid is not None:
            yield Process(int(pid), info.findtext("type", "").strip(), info.findtext("process_name", "").strip(),
                          _number(info.findtext("used_memory")))


def _number(text: str | None) -> float | None:
    found = _NUMBER.match((text or "").strip())
    if found is None:
        return None
    return float(int(found[0], 16)) if "x" in found[0].lower() else float(found[0])
