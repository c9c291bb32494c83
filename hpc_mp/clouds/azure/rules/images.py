"""CC6xx: images, and the sizes that they can run on."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.context import Case
from hpc_mp.clouds.azure.offer import Image
from hpc_mp.clouds.azure.partitions import sizes_of
from hpc_mp.clouds.azure.resolve import ResolvedNode, ResolvedSetting
from hpc_mp.clouds.azure.vocabulary import meant


def _image(node: ResolvedNode) -> ResolvedSetting | None:
    return next((each for name in ("ImageName", "Image") if (each := node.get(name)) and each.text), None)


def _pairs(case: Case) -> Iterator[tuple[ResolvedSetting, Image, MachineType]]:
    """Images that the catalogue knows with the sizes that they are to run on."""
    for node in case.real:
        each = _image(node)
        image = case.offer.image(each.text) if each else None
        if each and image:
            yield from ((each, image, size) for size in sizes_of(node, case.offer))


def _where(wrong: Callable[[Image, MachineType], bool],
           advice: Callable[[Image, MachineType], str] = lambda image, size: size.name) -> Callable[[Case], Iterable[Hit]]:
    return lambda case: (Hit(each.line, f"{each.text}{each.via}", advice(image, size))
                         for each, image, size in _pairs(case) if wrong(image, size))


def _other_processor(image: Image, size: MachineType) -> bool:
    return image.arch not in (size.arch, "unknown")


def _wrong_driver(image: Image, size: MachineType) -> bool:
    """An NVIDIA driver that does not know this GPU."""
    return size.gpu_vendor == "nvidia" and image.drivers == ("nvidia" if size.is_v100 else "nvidia-v100")


def _driver_advice(image: Image, size: MachineType) -> str:
    older = ", which needs the older driver" if size.is_v100 else ", and the driver is the older one, for V100"
    return f"{size.name} has {size.gpu_title}{older}"


def _other_maker(image: Image, size: MachineType) -> bool:
    return (size.gpu_vendor, image.drivers) in (("nvidia", "rocm"), ("amd", "nvidia"), ("amd", "nvidia-v100"))


def _bare(image: Image, size: MachineType) -> bool:
    return bool(size.gpus or size.rdma) and image.drivers == "none"


def _each(case: Case) -> Iterator[tuple[ResolvedSetting, Image | None]]:
    seen: set[int] = set()
    for node in case.real:
        each = _image(node)
        if each and each.line not in seen:
            seen.add(each.line)
            yield each, case.offer.image(each.text)


def _ended(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{each.text}{each.via}", image.ended) for each, image in _each(case) if image and image.ended)


def _unknown(case: Case) -> Iterable[Hit]:
    known = [image.name for image in case.offer.images.values() if ":" not in image.name]
    for each, image in _each(case):
        if image is None and each.text.casefold().startswith(("cycle.", "almalinux")) and ":" not in each.text:
            near = meant(each.text, known, 0.6)
            yield Hit(each.line, f"{each.text}{each.via}", f"Did you mean {near}?" if near else "Look it up in the form.")


def _latest(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{each.text}{each.via}") for each, _ in _each(case) if each.text.casefold().endswith(":latest"))


def _without_slurm(case: Case) -> Iterable[Hit]:
    return (Hit(each.line, f"{each.text}{each.via}") for each, image in _each(case) if image and not image.slurm)


def _different(case: Case) -> Iterable[Hit]:
    for cluster in case.clusters:
        arms = {size.arch for node in cluster.real for size in sizes_of(node, case.offer)}
        heads = [node for node in cluster.real if (role := node.configured("slurm.role")) and role.text.casefold() == "scheduler"]
        for node in heads if len(arms) > 1 else ():
            yield Hit(node.line, node.name, " and ".join(sorted(arms)))


RULES: tuple[Rule[Case], ...] = (
    Rule("CC601", "error", _where(_other_processor, lambda image, size: f"{size.name} is {size.arch}"),
         "{it} is an image for another processor: {advice}, and the machine does not boot.",
         "Choose an image of that architecture; for GB200 and GB300 one built for arm64."),
    Rule("CC602", "error", _where(_wrong_driver, _driver_advice),
         "The NVIDIA driver in {it} is not for this GPU: {advice}.",
         "Use microsoft-dsvm:ubuntu-hpc:2204-v100 for V100, microsoft-dsvm:ubuntu-hpc:2204 or :2404 for all later ones."),
    Rule("CC603", "error", _where(_other_maker, lambda image, size: f"{size.name} has {size.gpu_title}"),
         "{it} has the drivers of another maker's GPUs: {advice}, and no program sees them.",
         "Use an image with -rocm in its name for AMD's GPUs, one without for NVIDIA's."),
    Rule("CC604", "warning", _where(_bare),
         "{it} has neither GPU nor InfiniBand drivers, and {advice} needs them: every node installs them while it starts.",
         "Use an HPC image, such as microsoft-dsvm:ubuntu-hpc:2204:latest."),
    Rule("CC605", "error", _where(lambda image, size: not set(image.generations) & set(size.generations),
                                  lambda image, size: f"{size.name} takes generation {' or '.join(map(str, size.generations))}"),
         "{it} is an image of generation 1: {advice}, and the machine is refused.",
         "Use the image whose name ends in gen2."),
    Rule("CC606", "warning", _ended,
         "{it} is an image whose system ended on {advice}: no security updates, and no newer packages of Slurm.",
         "Use cycle.image.ubuntu22, cycle.image.ubuntu24 or almalinux9."),
    Rule("CC607", "warning", _unknown, "{it} is no image that CycleCloud is known to offer.", "{advice}"),
    Rule("CC608", "info", _latest, "{it} is not a fixed image: nodes that start on different days may have different drivers.",
         "Write the version in place of latest, and change it when all nodes are down."),
    Rule("CC609", "warning", _without_slurm,
         "{it} has no Slurm in it, and cyclecloud-slurm has no packages to install: the node never joins.",
         "Build an image from it with Slurm's packages, or use ubuntu-hpc or almalinux-hpc."),
    Rule("CC610", "info", _different,
         "The cluster of {it} has machines of {advice}: programs and environments on a shared disk fit one of them.",
         "Keep an environment for each, and name the partition in every job."),
)
