"""CC5xx and CC6xx: sizes, placement groups, and images that fit a size."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.context import Case, meant
from hpc_mp.clouds.azure.offer import image_fault
from hpc_mp.clouds.azure.resolve import SCALE_SET_DEFAULT, ResolvedNode, ResolvedSetting


def _machines(case: Case) -> Iterator[tuple[ResolvedSetting, str, MachineType | None]]:
    """Yield every size that a node names, once per line."""
    found = {(each.line, word): each for node in case.real if (each := node.get("MachineType")) for word in each.words}
    return ((machine, word, case.offer.size(word)) for (_, word), machine in found.items())


def _size(wrong: Callable[[Case, str, MachineType | None], str]) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of the sizes for which ``wrong`` returns a text, once per line."""
    return lambda case: (Hit(each.line, f"{word} (${each.parameter})" if each.parameter else word, advice)
                         for each, word, size in _machines(case) if (advice := wrong(case, word, size)))


def _misspelt(case: Case, word: str, size: MachineType | None) -> str:
    fast = size is None and re.match(r"(?i)standard_(n[cd]|h)", word)
    return (meant(word, [known.name for known in case.offer.sizes.values()], 0.9) or "") if fast else ""


def _no_rdma(case: Case) -> Iterable[Hit]:
    """Find sizes without InfiniBand that have a twin with it; a partition of one node does not need it."""
    alone = {machine.line for node in case.real if (most := node.get("MaxCount")) and most.number == 1
             if (machine := node.get("MachineType"))}
    hits = _size(lambda _, word, size: size.twin if size else "")(case)
    return (hit for hit in hits if hit.line not in alone)


def _hpc_without(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        machine = node.get("MachineType")
        if machine and node.is_hpc and any(not size.rdma and not size.twin for size in node.sizes):
            yield Hit(machine.line, node.partition, machine.shown)


def _rdma_without_hpc(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        hpc = node.configured("slurm.hpc")
        if hpc and hpc.is_false and any(size.rdma for size in node.sizes):
            yield Hit(hpc.line, node.partition, node.sizes[0].name)


def _beyond_scale_set(case: Case) -> Iterable[Hit]:
    for node in case.partitions:
        most, given = node.get("MaxCount") or node.get("MaxCoreCount"), node.get("Azure.MaxScalesetSize")
        held = given.number if given else SCALE_SET_DEFAULT
        count = _machines_of(most, node) if most else None
        if node.is_hpc and most and count is not None and held is not None and count > held:
            where = f"Azure.MaxScalesetSize = {held}" if given else f"Azure.MaxScalesetSize, {SCALE_SET_DEFAULT} by default"
            yield Hit(most.line, f"{most.name} = {most.shown}", where)


def _machines_of(most: ResolvedSetting, node: ResolvedNode) -> int | None:
    """Return the number of machines that MaxCount or MaxCoreCount allows; None if unknown."""
    if most.number is None or most.name.casefold() == "maxcount":
        return most.number
    return most.number // node.sizes[0].vcpus if node.sizes else None


def _of_groups(name: str, splits: Callable[[ResolvedSetting], bool]) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of attributes that split the placement group of a partition."""
    return lambda case: (Hit(found.line, node.partition, found.raw) for node in case.partitions
                         if node.is_hpc and (found := node.get(name)) and splits(found))


def _image(code: str) -> Callable[[Case], Iterable[Hit]]:
    """Return a finder of images that do not fit a size for the reason of this code."""
    def find(case: Case) -> Iterable[Hit]:
        for node in case.real:
            each = next((each for name in ("ImageName", "Image") if (each := node.get(name)) and each.text), None)
            image = case.offer.image(each.text) if each else None
            for size in node.sizes:
                fault = image_fault(image, size) if image else None
                if each and fault and fault[0] == code:
                    yield Hit(each.line, each.shown, fault[1])
    return find


RULES: tuple[Rule[Case], ...] = (
    Rule("CC501", "error", _size(lambda case, word, size: "" if re.fullmatch(r"(?i)(standard|basic)_\w[\w-]*", word) else "no"),
         "MachineType {it} is no size of Azure.", "Write it as Azure does: Standard_ND96isr_H100_v5."),
    Rule("CC502", "error", _size(_misspelt), "MachineType {it} is no size of Azure that is known.", "Did you mean {advice}?"),
    Rule("CC503", "error", _size(lambda case, word, size: size.retired if size and size.is_gone else ""),
         "{it} was retired on {advice}: no such machine can be started.",
         "Choose a size that exists: for training Standard_ND96isr_H100_v5 or Standard_ND96isr_H200_v5."),
    Rule("CC504", "info", _size(lambda case, word, size: size.retired if size and not size.is_gone else ""),
         "{it} is retired on {advice}: machines stop then, and new subscriptions may not get it.",
         "Choose a newer size for a cluster that is to last."),
    Rule("CC505", "warning", _no_rdma,
         "{it} has no r in its name and no InfiniBand: jobs on several nodes run over Ethernet, many times slower.",
         "Use {advice}."),
    Rule("CC506", "warning", _hpc_without,
         "slurm.hpc of {it} is on, and {advice} has no InfiniBand: its placement group only makes machines harder to get.",
         "Choose a size with r in its name, or set slurm.hpc = false."),
    Rule("CC507", "warning", _rdma_without_hpc,
         "{it} has slurm.hpc = false: machines of {advice} in different placement groups share no InfiniBand.",
         "Set slurm.hpc = true."),
    Rule("CC508", "warning", _beyond_scale_set,
         "{it} is more than one placement group holds ({advice}): nodes beyond share no InfiniBand, or never come.",
         "Lower it, or raise Azure.MaxScalesetSize as far as the size allows."),
    Rule("CC512", "error", _of_groups("Azure.SinglePlacementGroup", lambda found: found.is_false),
         "Azure.SinglePlacementGroup = false in {it}: machines in different placement groups share no InfiniBand.",
         "Delete the line."),
    Rule("CC515", "error", _of_groups("Zone", lambda found: len(found.words) > 1),
         "{it} has several zones ({advice}), and a placement group lies in one: machines in the others share no InfiniBand.",
         "Name one zone."),
    Rule("CC601", "error", _image("CC601"), "The image {it} {advice}: the machine does not boot.",
         "Choose an image of that architecture; for GB200 and GB300 one built for arm64."),
    Rule("CC602", "error", _image("CC602"), "The image {it} {advice}: no program sees the GPUs.",
         "Use microsoft-dsvm:ubuntu-hpc:2204-v100 for V100, one with -rocm in its name for AMD's GPUs, else :2204 or :2404."),
    Rule("CC604", "warning", _image("CC604"), "The image {it} {advice}: every node installs them while it starts.",
         "Use an HPC image, such as microsoft-dsvm:ubuntu-hpc:2204:latest."),
    Rule("CC605", "error", _image("CC605"), "The image {it} {advice}: the machine is refused.",
         "Use the image whose name ends in gen2."),
    Rule("CC606", "warning", _image("CC606"), "The image {it} {advice}: no security updates, and no newer packages of Slurm.",
         "Use cycle.image.ubuntu22, cycle.image.ubuntu24 or almalinux9."),
    Rule("CC609", "warning", _image("CC609"), "The image {it} {advice}: the node never joins.",
         "Build an image from it with Slurm's packages, or use ubuntu-hpc or almalinux-hpc."),
)
