"""What a cluster on Azure can be made of: sizes of the catalogue of machines; images and heads of ``cyclecloud/images.toml``."""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass
from functools import cache
from typing import Any

from hpc_mp.base.assets import asset
from hpc_mp.catalogue import MachineType, catalogue

ASSET = "cyclecloud/images.toml"


@dataclass(frozen=True, slots=True)
class Image:
    """An image; what each field is stands in the file."""

    name: str
    arch: str
    generations: tuple[int, ...]
    drivers: str
    network: bool
    slurm: bool = True
    ended: str = ""
    plain: str = ""
    python: str = ""


@dataclass(frozen=True, slots=True)
class Heads:
    """What runs beside the nodes that train, on their processor architecture: sizes, and the image of those without GPUs."""

    scheduler: str
    login: str
    htc: str
    image: str


@dataclass(frozen=True, slots=True)
class Offer:
    """Sizes and images by name in lower case; heads by processor architecture."""

    heads: Mapping[str, Heads]
    sizes: Mapping[str, MachineType]
    images: Mapping[str, Image]

    def size(self, name: str) -> MachineType | None:
        return self.sizes.get(name.casefold())

    def image(self, name: str) -> Image | None:
        """By URN, with or without its version, or by CycleCloud's name."""
        urn = re.sub(r"^([^:]+:[^:]+:[^:]+):[^:]*$", r"\1", name.strip())
        return self.images.get(urn.casefold())


def load_offer() -> Offer:
    """
    Raises:
        HpcMpError: the file was not installed, or a user's file of machines is wrong.
    """
    data = _read()
    images = [_image(row) for row in data["image"]]
    heads = {arch: Heads(**row) for arch, row in data["heads"].items()}
    sizes = {size.name.casefold(): size for size in catalogue().of("azure")}
    return Offer(heads, sizes, {image.name.casefold(): image for image in images})


def _image(row: dict[str, Any]) -> Image:
    figures = {key: value for key, value in row.items() if key != "from"}
    return Image(**{**figures, "generations": tuple(row["generations"])})


@cache
def _read() -> dict[str, Any]:
    return tomllib.loads(asset(ASSET).read_text(encoding="utf-8"))
