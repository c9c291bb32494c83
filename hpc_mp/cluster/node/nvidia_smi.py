"""The output of ``nvidia-smi``: a quick CSV row per GPU, or its whole answer in XML as a flat table of texts."""

import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from xml.etree import ElementTree

from hpc_mp.base.command import Runner, ask
from hpc_mp.cluster.node.source import NodeSource, Unavailable

_PATIENCE_S = 30.0  # without its persistence daemon the driver first wakes every GPU
_ask_driver = functools.partial(ask, timeout=_PATIENCE_S)
_LOAD = ("index", "pci.bus_id", "clocks.current.sm", "clocks.max.sm", "power.draw", "temperature.gpu", "utilization.gpu",
         "pcie.link.gen.current", "pcie.link.gen.max", "pcie.link.width.current", "pcie.link.width.max")
_REASONS = ("clocks_event_reasons.active", "clocks_throttle_reasons.active")  # since driver 535.54.03; before it


@dataclass(frozen=True, slots=True)
class Gpu:
    """One GPU. ``memory`` is in bytes, None if the driver does not report it (GPUs that share the host's memory)."""

    index: int
    name: str
    memory: int | None


@dataclass(frozen=True)
class GpuLoad:
    """The current load of one GPU. A number is None if the driver does not report it."""

    index: int
    bus: str
    # clock, max_clock: MHz
    clock: float | None
    max_clock: float | None
    power: float | None  # W
    temperature: float | None  # degrees C
    busy: float | None  # utilization over the last moments in %
    # (current generation, highest generation, current lanes, most lanes)
    pcie: tuple[float | None, float | None, float | None, float | None]
    reasons: int | None  # bit mask of the reasons that limit its clock


def find_gpus(ask: Runner = _ask_driver) -> tuple[Gpu, ...]:
    """Return the GPUs that ``nvidia-smi`` sees; none without a driver."""
    try:
        rows = tuple(query(NodeSource(ask=ask), "gpu", ("index", "name", "memory.total")))
    except Unavailable:
        return ()
    return tuple(Gpu(int(row["index"]), row["name"], int(row["memory.total"]) * 2**20 if row["memory.total"].isdigit() else None)
                 for row in rows)


def query(source: NodeSource, what: str, fields: Sequence[str]) -> Iterator[Mapping[str, str]]:
    """Run ``nvidia-smi --query-WHAT``: yield rows of field to text. Raises Unavailable."""
    try:
        answer = source.answer(("nvidia-smi", f"--query-{what}={','.join(fields)}", "--format=csv,noheader,nounits"))
    except Unavailable as unseen:  # rows of reachable GPUs may accompany its error
        message = " ".join(line for line in unseen.out.splitlines() if line.count(",") != len(fields) - 1)
        raise Unavailable(message or str(unseen), unseen.code) from None
    for line in answer.splitlines():
        cells = [cell.strip() for cell in line.split(",")]
        if len(cells) == len(fields):
            yield dict(zip(fields, cells, strict=True))


def read_load(source: NodeSource) -> tuple[GpuLoad, ...]:
    """Return the current load of each GPU. Raises Unavailable."""
    with suppress(Unavailable):  # an older driver refuses the whole query for one unknown field
        return tuple(_load(row, _REASONS[0]) for row in query(source, "gpu", (*_LOAD, _REASONS[0])))
    return tuple(_load(row, _REASONS[1]) for row in query(source, "gpu", (*_LOAD, _REASONS[1])))


def number(text: str) -> float | None:
    """Parse a number; None for "[N/A]" and the like."""
    match = re.fullmatch(r"-?\d+(?:\.\d+)?", text)
    return float(text) if match else None


def _load(row: Mapping[str, str], reasons: str) -> GpuLoad:
    values = {name: number(text) for name, text in row.items()}
    mask = row[reasons]
    return GpuLoad(
        index=int(row["index"]),
        bus=address(row["pci.bus_id"]),
        clock=values["clocks.current.sm"],
        max_clock=values["clocks.max.sm"],
        power=values["power.draw"],
        temperature=values["temperature.gpu"],
        busy=values["utilization.gpu"],
        pcie=(values["pcie.link.gen.current"], values["pcie.link.gen.max"],
              values["pcie.link.width.current"], values["pcie.link.width.max"]),
        reasons=int(mask, 16) if re.fullmatch(r"0x[0-9a-fA-F]+", mask) else None,
    )


# --- the whole answer -------------------------------------------------------------------------------------------------

QUERY = ("nvidia-smi", "-q", "-x")
_UNSAID = re.compile("|N/A|Not Supported|Not Available|Unknown|Insufficient Permissions|Requested functionality .* deprecated")
# NVML's error texts, which nvidia-smi prints in place of a value, in CSV in brackets.
_FAILED = re.compile(r"\[?(ERR!|Unknown Error|GPU is lost.*?|(?:GPU )?requires reset|Reset Required|GPU not found|Timeout"
                     r"|Driver Not Loaded|Corrupted infoROM|infoROM is corrupted|Interrupt Request Issue|GPU access blocked.*?"
                     r"|Insufficient (?:External )?Power)\]?", re.IGNORECASE)
_NUMBER = re.compile(r"-?(?:0x[0-9a-f]+|\d+(?:\.\d+)?)", re.IGNORECASE)
_LONG = ("supported_clocks", "mig_devices", "accounted_processes", "processes")  # lists that do not concern the GPU's health


@dataclass(frozen=True)
class GpuReport:
    """One GPU."""

    index: int  # nvidia-smi's index, which follows the order of the PCI bus
    bus: str  # its PCI address in the kernel's form: ``0000:c6:00.0``
    # nvidia-smi's texts by path, such as ``"ecc_mode/current_ecc": "Enabled"``
    values: Mapping[str, str] = field(default_factory=dict)

    def __str__(self) -> str:
        return f"GPU {self.index} ({self.bus})"

    @property
    def name(self) -> str:
        return self.says("product_name") or "unknown GPU"

    def says(self, *paths: str) -> str | None:
        """Return the text at the first path that has one; drivers of different age use different names."""
        texts = (self.values.get(path, "").strip("[]") for path in paths)
        return next((text for text in texts if not _UNSAID.fullmatch(text) and not failing(text)), None)

    def number(self, *paths: str) -> float | None:
        """Return the number at the first path that has one, without its unit (nvidia-smi writes MiB, W, C, MHz)."""
        return next((value for path in paths if (value := _number(self.says(path))) is not None), None)

    def failed(self) -> Mapping[str, str]:
        """The driver's error texts, by the paths where it got an error instead of a value."""
        return {path: message for path, text in self.values.items() if (message := failing(text))}


@dataclass(frozen=True)
class SmiReport:
    """nvidia-smi's answer. ``attached`` is the number of GPUs it claims to see, ``driver`` its version."""

    driver: str
    attached: int | None
    gpus: tuple[GpuReport, ...]


def failing(text: str) -> str | None:
    """Return the driver's error text in place of a value; None for a value."""
    match = _FAILED.fullmatch(text)
    return match[1] if match else None


def split_smi(text: str) -> tuple[str, str]:
    """Return the XML, empty if incomplete, and the text printed around it: about an unreachable GPU, or a corrupt infoROM."""
    document = re.search(r"<(?:\?xml|nvidia_smi_log)\b.*</nvidia_smi_log>", text, re.DOTALL)
    around = text.replace(document[0], "") if document else text
    return document[0] if document else "", "; ".join(line.strip() for line in around.splitlines() if line.strip())


def parse_smi(text: str) -> SmiReport:
    """Parse nvidia-smi's XML. Raises Unavailable if ``text`` is something else."""
    try:
        root = ElementTree.fromstring(text)
    except ElementTree.ParseError as error:
        raise Unavailable(f"nvidia-smi -q -x printed no XML ({error}): {text[:60]!r}") from None
    if root.tag != "nvidia_smi_log":
        raise Unavailable(f"nvidia-smi -q -x printed other XML: <{root.tag}>")
    attached = _number(root.findtext("attached_gpus"))
    return SmiReport(
        driver=root.findtext("driver_version", "").strip(),
        attached=None if attached is None else int(attached),
        gpus=tuple(_gpu(index, element) for index, element in enumerate(root.iter("gpu"))),
    )


def address(bus: str) -> str:
    """Return a PCI address in the kernel's form: nvidia-smi's ``00000000:C6:00.0`` is ``0000:c6:00.0``."""
    domain, _, rest = bus.strip().lower().rpartition(":")[0].partition(":")
    tail = bus.strip().lower().rpartition(":")[2]
    with suppress(ValueError):
        return f"{int(domain, 16):04x}:{rest}:{tail}"
    return bus.strip().lower()


def _gpu(index: int, element: ElementTree.Element) -> GpuReport:
    values = dict(_flat(element, ""))
    bus = element.get("id") or values.get("pci/pci_bus_id") or ""
    return GpuReport(index, address(bus), values)


def _flat(element: ElementTree.Element, prefix: str) -> Iterator[tuple[str, str]]:
    for child in element:
        if child.tag in _LONG:
            continue
        path = f"{prefix}{child.tag}"
        if len(child):
            yield from _flat(child, f"{path}/")
        else:
            yield path, (child.text or "").strip()


def _number(text: str | None) -> float | None:
    match = _NUMBER.match((text or "").strip())
    if match is None:
        return None
    return float(int(match[0], 16)) if "x" in match[0].lower() else float(match[0])
