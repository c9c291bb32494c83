"""Releases of the libraries that variables are for, and what a guard says of them."""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from importlib import metadata
from typing import Literal

from hpc_mp.cluster.node.parse import maybe
from hpc_mp.cluster.node.source import NodeSource, Unavailable

Release = tuple[int, ...]
Installed = Callable[[str], str | None]  # the release of a Python package, None where there is none
Library = Literal["nccl", "ofi-nccl", "libfabric", "driver"]  # driver: NVIDIA's; CUDA 12 needs 525.60.13
GUARD = re.compile(r"\s*(>=|<=|<|>)\s*(\d+(?:\.\d+)*)\s*")
_SIGNS: Mapping[str, Callable[[Release, Release], bool]] = {
    ">=": lambda have, want: have >= want, "<=": lambda have, want: have <= want,
    ">": lambda have, want: have > want, "<": lambda have, want: have < want,
}
# where NCCL's file lies, under a name that tells its release, when it is no part of a Python environment
_NCCL = ("/usr/lib/*-linux-gnu/libnccl.so.*", "/usr/lib64/libnccl.so.*", "/usr/local/lib/libnccl.so.*")
_EFA = "/opt/amazon/efa_installed_packages"  # what the EFA installer has put there
_OFI_NCCL = "(?:libnccl-ofi|aws-ofi-nccl)"


def release(text: str) -> Release:
    """The numbers that text begins with, up to three: (2, 30, 7) of "2.30.7-1+cuda13.0"."""
    found = re.match(r"\d+(?:\.\d+){0,2}", text)
    return tuple(map(int, found[0].split("."))) if found else ()


def shown(numbers: Release) -> str:
    return ".".join(map(str, numbers))


def holds(guard: str, have: Release | None) -> bool | None:
    """Whether ``">=2.21"`` or ``">=1.6,<1.7"`` holds; None where the release is not known."""
    if not have:
        return None
    return all(_SIGNS[sign](_three(have), _three(release(want))) for sign, want in GUARD.findall(guard))


def distribution(name: str) -> str | None:
    """Of this interpreter, which is that of the ranks unless a job names another."""
    try:
        return metadata.version(name)
    except metadata.PackageNotFoundError:
        return None


def versions(source: NodeSource, installed: Installed = distribution) -> dict[str, Release]:
    """The releases of libraries, those that can be told without loading any of them."""
    found = {"nccl": _nccl(source, installed), "ofi-nccl": _efa_package(source, _OFI_NCCL), "libfabric": _libfabric(source),
             "driver": release(maybe(source.text, "/sys/module/nvidia/version") or "")}
    return {name: have for name, have in found.items() if have}


def _nccl(source: NodeSource, installed: Installed) -> Release:
    """PyTorch brings its own, which goes before the system's."""
    own = next(filter(None, (installed(f"nvidia-nccl-cu{cuda}") for cuda in (13, 12, 11))), None)
    if own is not None:
        return release(own)
    files = (path.partition(".so.")[2] for pattern in _NCCL for path in source.names(pattern))
    return max(map(release, files), default=())


def _libfabric(source: NodeSource) -> Release:
    try:
        found = re.search(r"libfabric: ([\d.]+)", source.answer(("fi_info", "--version")))
    except Unavailable:
        return _efa_package(source, "libfabric1?-aws")
    return release(found[1]) if found else ()


def _efa_package(source: NodeSource, name: str) -> Release:
    found = re.search(rf"\b{name}[a-z0-9-]*[_-](\d[\d.]*)", maybe(source.text, _EFA) or "")
    return release(found[1]) if found else ()


def _three(numbers: Release) -> Release:
    return (*numbers, 0, 0, 0)[:3]
