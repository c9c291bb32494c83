"""Machines that show the files of a table and nothing else, and run no program."""

from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.node.source import NodeSource


def machine(folder: Path, files: Mapping[str, str | bytes] = MappingProxyType({})) -> NodeSource:
    for name, text in files.items():
        path = folder / name.lstrip("/")
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(text.encode() if isinstance(text, str) else text)
    return NodeSource(folder, silent)


def silent(argv: object) -> str:
    raise CommandFailed("no such program")
