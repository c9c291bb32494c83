"""CC5xx: sizes, and which machines share a fabric."""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.partitions import SCALE_SET_DEFAULT, Partition
from hpc_mp.clouds.azure.resolve import ResolvedSetting
from hpc_mp.clouds.azure.vocabulary import meant

_PROXIMITY = tuple(f"{owner}ProximityPlacementGroup{end}" for owner in ("", "Azure.") for end in ("", "Id"))
_FAST = re.compile(r"(?i)standard_(n[cd]|h)")


def _machines(case: Case) -> Iterator[tuple[ResolvedSetting, str, MachineType | None]]:
    """Every size that a node names, once a line."""
    seen: set[tuple[int, str]] = set()
    for node in case.real:
        machine = node.get("MachineType")
        for word in machine.words if machine else ():
            if machine and (machine.line, word) not in seen:
                seen.add((machine.line, word))
                yield machine, word, case.offer.size(word)


def _form(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{word}{each.via}") for each, word, _ in _machines(case)
            if not re.fullmatch(r"(?i)(standard|basic)_\w[\w-]*", word))


def _misspelt(case: Case) -> Iterable[Hit]:
    known = [size.name for size in case.offer.sizes.values()]
    for each, word, size in _machines(case):
        if size is None and _FAST.match(word) and (near := meant(word, known, 0.9)):
            yield Hit(each.line, f"{word}{each.via}", near)


def _retired(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{word}{each.via}", size.retired) for each, word, size in _machines(case)
            if size and size.is_gone)


def _retires(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{word}{each.via}", size.retired) for each, word, size in _machines(case)
            if size and size.retired and not size.is_gone)


def _no_rdma(case: Case) -> Iterable[Hit]:
    """A partition of one node needs no InfiniBand."""
    alone = {machine.line for node in case.real if (most := node.get("MaxCount")) and most.number == 1
             if (machine := node.get("MachineType"))}
    return (Hit(each.line, f"{word}{each.via}", size.twin) for each, word, size in _machines(case)
            if size and size.twin and each.line not in alone)


def _hpc_without(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        without = [size.name for size in each.sizes if not size.rdma and not size.twin]
        if each.is_hpc and without and each.machine:
            yield Hit(each.size_line, each.name, f"{without[0]}{each.machine.via}")


def _rdma_without_hpc(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        if each.hpc and each.hpc.is_false and each.has_rdma:
            yield Hit(each.hpc.line, each.name, each.sizes[0].name)


def _beyond_scale_set(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        most, held = each.node.get("MaxCount") or each.node.get("MaxCoreCount"), each.scale_set
        count = _machines_of(most, each) if most else None
        if each.is_hpc and most and count is not None and held is not None and count > held:
            given = each.node.get("Azure.MaxScalesetSize")
            where = f"Azure.MaxScalesetSize = {held}" if given else f"Azure.MaxScalesetSize, {SCALE_SET_DEFAULT} by default"
            yield Hit(most.line, f"{most.name} = {most.number}{most.via}", where)


def _machines_of(most: ResolvedSetting, partition: Partition) -> int | None:
    """How many machines MaxCount or MaxCoreCount allow; None where that is not known."""
    if most.number is None or most.name.casefold() == "maxcount":
        return most.number
    return most.number // partition.sizes[0].vcpus if partition.sizes else None


def _beyond_group(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        held = each.node.get("Azure.MaxScalesetSize")
        for size in each.sizes[:1]:
            if each.is_hpc and held and held.number is not None and held.number > size.placement_group_max:
                yield Hit(held.line, f"{held.number}{held.via}", f"{size.placement_group_max} of {size.name}")


def _spot(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        spot = each.node.get("Interruptible")
        if spot and spot.is_true and (each.has_rdma or (each.hpc and each.hpc.is_true)):
            yield Hit(spot.line, each.name)


def _proximity(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        for name in _PROXIMITY:
            found = each.node.get(name)
            if found and (each.has_rdma or (each.hpc and each.hpc.is_true)):
                yield Hit(found.line, each.name)


def _split_group(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        found = each.node.get("Azure.SinglePlacementGroup")
        if found and found.is_false and each.is_hpc:
            yield Hit(found.line, each.name)


def _mixed(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        if each.machine and len(each.machine.words) > 1 and not each.is_dynamic:
            yield Hit(each.machine.line, each.name, each.machine.words[0])


def _blocks(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        most = each.node.get("MaxCount")
        block = each.sizes[0].nvlink_block if each.sizes else 0
        if most and most.number and block and most.number % block:
            yield Hit(most.line, f"MaxCount = {most.number}", str(block))


def _zones(case: Case) -> Iterable[Hit]:
    for each in case.partitions:
        zone = each.node.get("Zone")
        if zone and len(zone.words) > 1 and each.is_hpc:
            yield Hit(zone.line, each.name, zone.raw)


def _small_head(case: Case) -> Iterable[Hit]:
    for node in case.real:
        role = node.configured("slurm.role")
        machine = node.get("MachineType")
        size = case.offer.size(machine.text) if machine else None
        if role and role.text.casefold() == "scheduler" and size and machine and (size.vcpus < 4 or size.gpus):
            what = f"has {size.gpus} GPUs, which a scheduler never uses" if size.gpus else f"has {size.vcpus} vCPUs"
            yield Hit(machine.line, f"{size.name}{machine.via} {what}")



RULES: tuple[Rule[Case], ...] = (
    Rule("CC501", "error", _form, "MachineType {it} is no size of Azure.", "Write it as Azure does: Standard_ND96isr_H100_v5."),
    Rule("CC502", "error", _misspelt, "MachineType {it} is no size of Azure that is known.", "Did you mean {advice}?"),
    Rule("CC503", "error", _retired, "{it} was retired on {advice}: no such machine can be started.",
         "Choose a size that exists: for training Standard_ND96isr_H100_v5 or Standard_ND96isr_H200_v5."),
    Rule("CC504", "info", _retires, "{it} is retired on {advice}: machines stop then, and new subscriptions may not get it.",
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
    Rule("CC509", "warning", _beyond_group,
         "Azure.MaxScalesetSize = {it} is more than a placement group is known to hold ({advice}): Azure may refuse it.",
         "Lower it to that."),
    Rule("CC510", "warning", _spot,
         "{it} is Spot with InfiniBand: one machine that Azure takes back ends every job that it is part of.",
         "Set Interruptible = false, or checkpoint often and let jobs be queued again (hpc-mp does)."),
    Rule("CC511", "warning", _proximity,
         "A proximity placement group puts machines of {it} near each other, which is no InfiniBand, and harder to get.",
         "Leave it out: slurm.hpc = true puts them into one placement group of a scale set, which is what InfiniBand needs."),
    Rule("CC512", "error", _split_group,
         "Azure.SinglePlacementGroup = false in {it}: machines in different placement groups share no InfiniBand.",
         "Delete the line."),
    Rule("CC513", "warning", _mixed, "{it} has several sizes and no slurm.dynamic_feature: only the first ({advice}) is used.",
         "Name one size, or make the partition a dynamic one."),
    Rule("CC514", "info", _blocks,
         "{it} is no multiple of {advice}, the machines of one NVLink: the last block stays part-filled.",
         "Choose a multiple of {advice}."),
    Rule("CC515", "error", _zones,
         "{it} has several zones ({advice}), and a placement group lies in one: machines in the others share no InfiniBand.",
         "Name one zone."),
    Rule("CC516", "warning", _small_head, "The scheduler's size {it}.",
         "Take a CPU size with 4 vCPUs or more, such as Standard_D4ads_v5."),
)
