"""Components of a cluster on Azure: sizes from the machine catalogue; images and heads from ``cyclecloud/images.toml``."""

import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass

from hpc_mp.base.assets import asset_table
from hpc_mp.catalogue import MachineType, catalogue


@dataclass(frozen=True, slots=True)
class Image:
    """An image; its fields are documented in the file."""

    name: str
    arch: str
    generations: list[int]
    drivers: str
    network: bool
    slurm: bool = True
    ended: str = ""
    plain: str = ""
    python: str = ""


@dataclass(frozen=True, slots=True)
class Offer:
    """Components that Azure offers."""

    # by processor architecture: sizes of the scheduler, login and htc machines, and their image without GPUs
    heads: Mapping[str, Mapping[str, str]]
    # sizes, images: by name in lower case
    sizes: Mapping[str, MachineType]
    images: Mapping[str, Image]

    def size(self, name: str) -> MachineType | None:
        return self.sizes.get(name.casefold())

    def image(self, name: str) -> Image | None:
        """Return the image by URN, with or without version, or by CycleCloud's name."""
        urn = re.sub(r"^([^:]+:[^:]+:[^:]+):[^:]*$", r"\1", name.strip())
        return self.images.get(urn.casefold())


def load_offer() -> Offer:
    """Load the offer. Raises HpcMpError if a file was not installed, or a user's file of machines is wrong."""
    data = asset_table("cyclecloud/images.toml")
    images = [Image(**{key: value for key, value in row.items() if key != "from"}) for row in data["image"]]
    sizes = {size.name.casefold(): size for size in catalogue().of("azure")}
    return Offer(data["heads"], sizes, {image.name.casefold(): image for image in images})


def _drivers(size: MachineType) -> str:
    """Return the drivers that a size needs, as named by images; "" for a size without GPUs."""
    return {"amd": "rocm", "nvidia": "nvidia-v100" if size.gpu_title.startswith("V100") else "nvidia"}.get(size.gpu_vendor, "")


# Reasons why an image does not fit a size, the gravest first: (code of the linter's rule, condition, text).
_IMAGE_FAULTS: tuple[tuple[str, Callable[[Image, MachineType], bool], str], ...] = (
    ("CC601", lambda image, size: image.arch not in (size.arch, "unknown"),
     "is for {image.arch}, and {size.name} is {size.arch}"),
    ("CC605", lambda image, size: not set(image.generations) & set(size.generations),
     "is of generation {image.generations[0]}, and {size.name} takes {size.generations[0]}"),
    ("CC602", lambda image, size: bool(size.gpu_vendor) and image.drivers not in (_drivers(size), "unknown", "none"),
     "has the drivers {image.drivers}, and {size.name} has {size.gpu_title} on {size.arch}"),
    ("CC604", lambda image, size: bool(size.gpu_vendor) and image.drivers == "none",
     "has no drivers, and {size.name} has {size.gpu_title} on {size.arch}"),
    ("CC604", lambda image, size: bool(size.rdma) and not image.network, "has no drivers of InfiniBand, and {size.name} has it"),
    ("CC606", lambda image, size: bool(image.ended), "is of a system without updates since {image.ended}"),
    ("CC609", lambda image, size: not image.slurm, "has no packages of Slurm, and cyclecloud-slurm has none for it"),
)


def image_fault(image: Image, size: MachineType) -> tuple[str, str] | None:
    """Return the gravest fault of an image on a size as (code of the rule, text); None if it fits."""
    return next(((code, text.format(image=image, size=size)) for code, wrong, text in _IMAGE_FAULTS if wrong(image, size)), None)
