"""Azure's sizes and images, and other clouds' machines: two files of one form as dataclasses.

The linter of Azure's templates reads the first alone; ``load_machines`` is both.
"""

from __future__ import annotations

import re
import tomllib
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from functools import cache
from typing import Any

from hpc_mp.base.assets import asset

READ = "2026-01-01"  # what was retired by then is gone, what is later is announced
AZURE, OTHERS = "cyclecloud/catalogue.toml", "cyclecloud/other-clouds/catalogue.toml"


@dataclass(frozen=True, slots=True)
class Size:
    """A size of Azure, or a machine of another cloud; what each field is stands in the files.

    ``sources``: figure → where it is from.
    """

    name: str
    vcpus: int
    memory_gib: int
    numa: int
    arch: str
    generations: tuple[int, ...]
    placement_group_max: int
    sources: Mapping[str, str] = field(hash=False)
    gpus: int = 0
    gpu_model: str = ""
    gpu_vendor: str = ""
    gres: str = ""
    nics: int = 0
    rdma: str = ""
    rdma_gbps: int = 0
    busbw: float = 0
    nvlink_block: int = 0
    threads: int = 1
    image: str = ""
    profile: str = ""
    quota: str = ""
    twin: str = ""
    retired: str = ""
    cloud: str = "azure"
    busbw_pair: float = 0
    fabric: str = ""

    @property
    def quota_vcpus(self) -> int:
        """What one machine takes of a quota: a size with constrained cores, as HB120-16rs_v3, is counted as its whole machine.

        Azure's page on constrained sizes says so of the price, github.com/MicrosoftDocs/azure-docs/issues/23017 of the quota.
        """
        whole = re.match(r"Standard_[A-Z]+(\d+)-", self.name)
        return int(whole[1]) if whole else self.vcpus

    @property
    def is_v100(self) -> bool:
        return self.gpu_model.startswith("V100")

    @property
    def is_gone(self) -> bool:
        """Whether no such machine can be started any more."""
        return bool(self.retired) and self.retired <= READ


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
class Catalogue:
    """Sizes and images by name in lower case; heads by processor architecture."""

    sources: Mapping[str, str]
    heads: Mapping[str, Heads]
    sizes: Mapping[str, Size]
    images: Mapping[str, Image]

    def size(self, name: str) -> Size | None:
        return self.sizes.get(name.casefold())

    def image(self, name: str) -> Image | None:
        """By URN, with or without its version, or by CycleCloud's name."""
        urn = re.sub(r"^([^:]+:[^:]+:[^:]+):[^:]*$", r"\1", name.strip())
        return self.images.get(urn.casefold())


@cache
def load_catalogue() -> Catalogue:
    """
    Raises:
        HpcMpError: the file was not installed.
    """
    data = _read(AZURE)
    images = [Image(**_frozen(row, "from")) for row in data["image"]]
    heads = {arch: Heads(**row) for arch, row in data["heads"].items()}
    return Catalogue(data["sources"], heads, _sizes(data), {image.name.casefold(): image for image in images})


@cache
def load_machines() -> Catalogue:
    """Azure's sizes and the machines of other clouds; the images are Azure's.

    Raises:
        HpcMpError: a file was not installed.
    """
    azure, others = load_catalogue(), _read(OTHERS)
    return replace(azure, sources={**azure.sources, **others["sources"]}, sizes={**azure.sizes, **_sizes(others)})


def _read(name: str) -> dict[str, Any]:
    return tomllib.loads(asset(name).read_text(encoding="utf-8"))


def _sizes(data: dict[str, Any]) -> dict[str, Size]:
    sizes = [_size(series, name, own) for series in data["series"] for name, own in series["sizes"].items()]
    return {size.name.casefold(): size for size in sizes}


def _size(series: dict[str, Any], name: str, own: dict[str, Any]) -> Size:
    sources = {figure: source for source, figures in series["from"].items() for figure in figures}
    return Size(name=name, sources=sources, **_frozen(series, "from", "sizes"), **own)


def _frozen(row: dict[str, Any], *without: str) -> dict[str, Any]:
    return {key: tuple(value) if isinstance(value, list) else value for key, value in row.items() if key not in without}
