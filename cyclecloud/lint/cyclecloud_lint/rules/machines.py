"""CC5xx and CC6xx: sizes, placement groups, and images that fit a size."""

import re
from collections.abc import Callable, Iterable

from cyclecloud_lint.case import Case
from cyclecloud_lint.tables import rules_of
from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.text import nearest
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import image_fault

_SCALE_SET = 40  # default of Azure.MaxScalesetSize


def _size(advice_of: Callable[[Case, str, MachineType | None], str]) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of the sizes for which ``advice_of`` returns a text, once per line."""
    def find(case: Case) -> Iterable[Hit]:
        machines = [machine for node in case.real if (machine := node.get("MachineType"))]
        names = {(machine.line, word): machine for machine in machines for word in machine.words}
        for (line, word), machine in names.items():
            if advice := advice_of(case, word, case.offer.size(word)):
                yield Hit(line, f"{word} (${machine.parameter})" if machine.parameter else word, advice)
    return find


def _no_size(case: Case, word: str, size: MachineType | None) -> str:
    """Return the name to write for one that is not a size. The catalogue has only some sizes of families without GPUs."""
    full = word if re.match(r"(?i)(standard|basic)_", word) else f"Standard_{word}"
    near = [] if size else nearest(full, [kind.name for kind in case.offer.sizes.values()], 0.9)
    if near and (full != word or re.match(r"(?i)standard_n[cd]", word)):
        return near[0]
    is_name = full == word and re.fullmatch(r"\w+_\w[\w-]*", word)
    return "" if size or is_name else "it as Azure does: Standard_ND96isr_H100_v5"


def _no_rdma(case: Case) -> Iterable[Hit]:
    """Find sizes without InfiniBand that have a twin with it; a partition of one node does not need it."""
    alone = {machine.line for node in case.real if (count := node.get("MaxCount")) and count.number == 1
             if (machine := node.get("MachineType"))}
    return (hit for hit in _size(lambda _, word, size: size.twin if size else "")(case) if hit.line not in alone)


def _beyond_scale_set(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        limit, group = node.get("MaxCount") or node.get("MaxCoreCount"), node.get("Azure.MaxScalesetSize")
        size = group.number if group else _SCALE_SET
        cores = 1 if node.get("MaxCount") else node.sizes[0].vcpus if node.sizes else None
        if node.is_hpc and limit and limit.number and size and cores and limit.number // cores > size:
            where = f"Azure.MaxScalesetSize = {size}" if group else f"Azure.MaxScalesetSize, {_SCALE_SET} by default"
            yield Hit(limit.line, f"{limit.name} = {limit.shown}", where)


def _image(code: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of images that do not fit a size for the reason of this code."""
    def find(case: Case) -> Iterable[Hit]:
        for node in case.real:
            setting = node.get("ImageName") or node.get("Image")
            image = case.offer.image(setting.text) if setting else None
            for fault in (image_fault(image, size) for size in node.sizes if image):
                if setting and fault and fault[0] == code:
                    yield Hit(setting.line, setting.shown, fault[1])
    return find


RULES: tuple[Rule[Case], ...] = rules_of({
    "CC502": _size(_no_size),
    "CC503": _size(lambda case, word, size: size.retired if size and size.is_gone else ""),
    "CC504": _size(lambda case, word, size: size.retired if size and not size.is_gone else ""),
    "CC505": _no_rdma,
    "CC506": lambda case: (Hit(machine.line, node.partition, machine.shown) for node in case.partitions
                           if (machine := node.get("MachineType")) and node.is_hpc
                           and any(not size.rdma and not size.twin for size in node.sizes)),
    "CC507": lambda case: (Hit(hpc.line, node.partition, node.sizes[0].name) for node in case.partitions
                           if (hpc := node.get("slurm.hpc")) and hpc.flag is False and any(size.rdma for size in node.sizes)),
    "CC508": _beyond_scale_set,
    "CC515": lambda case: (Hit(zone.line, node.partition, zone.raw) for node in case.partitions if (zone := node.get("Zone"))
                           if node.is_hpc and len(zone.words) > 1),
    **{code: _image(code) for code in ("CC601", "CC602", "CC604", "CC605", "CC606", "CC609")},
})
