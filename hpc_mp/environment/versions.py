"""Releases of the libraries that read the variables, and guards on these releases."""

import re
from collections.abc import Callable
from importlib import metadata
from typing import Literal

from packaging.specifiers import SpecifierSet

from hpc_mp.cluster.node.source import NodeSource, Unavailable, maybe

Release = tuple[int, ...]
Installed = Callable[[str], str | None]  # returns the release of a Python package; None if not installed
Library = Literal["nccl", "ofi-nccl", "libfabric", "driver"]  # driver: NVIDIA's driver; CUDA 12 needs 525.60.13
# NCCL's files outside a Python environment, with the release in their names
_NCCL = ("/usr/lib/*-linux-gnu/libnccl.so.*", "/usr/lib64/libnccl.so.*", "/usr/local/lib/libnccl.so.*")
_EFA = "/opt/amazon/efa_installed_packages"  # written by the EFA installer
_OFI_NCCL = "(?:libnccl-ofi|aws-ofi-nccl)"


def release(text: str) -> Release:
    """Return the leading numbers of text, up to three: (2, 30, 7) for "2.30.7-1+cuda13.0"."""
    match = re.match(r"\d+(?:\.\d+){0,2}", text)
    return tuple(map(int, match[0].split("."))) if match else ()


def shown(numbers: Release) -> str:
    return ".".join(map(str, numbers))


def holds(guard: str, have: Release | None) -> bool | None:
    """Return True if a guard such as ``">=2.21"`` or ``">=1.6,<1.7"`` holds; None if the release is unknown."""
    if not have:
        return None
    return SpecifierSet(guard).contains(shown(have))


def distribution(name: str) -> str | None:
    """Return the release of a package of this interpreter, which the ranks use unless the job names another."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(source: NodeSource, installed: Installed = distribution) -> dict[str, Release]:
    """Return the releases of libraries, as far as they are known without loading any library."""
    releases = {"nccl": _nccl(source, installed), "ofi-nccl": _efa_package(source, _OFI_NCCL), "libfabric": _libfabric(source),
                "driver": release(maybe(source.text, "/sys/module/nvidia/version") or "")}
    return {name: numbers for name, numbers in releases.items() if numbers}


def _nccl(source: NodeSource, installed: Installed) -> Release:
    """Return the release of NCCL. PyTorch's bundled library takes precedence over the system's."""
    bundled = next(filter(None, (installed(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11))), None)
    if bundled is not None:
        return release(bundled)
    files = (path.partition(".so.")[2] for pattern in _NCCL for path in source.names(pattern))
    return max(map(release, files), default=())


def _libfabric(source: NodeSource) -> Release:
    try:
        match = re.search(r"libfabric: ([\d.]+)", source.answer(("fi_info", "--version")))
    except Unavailable:
        return _efa_package(source, "libfabric1?-aws")
    return release(match[1]) if match else ()


def _efa_package(source: NodeSource, name: str) -> Release:
    match = re.search(rf"\b{name}[a-z0-9-]*[_-](\d[\d.]*)", maybe(source.text, _EFA) or "")
    return release(match[1]) if match else ()
