"""Records this machine as a tree: ``python -m tests.machines.record DIRECTORY``. What the checks read is kept, and nothing else:
no environment, of processes only the first, of file systems only disks, network file systems and ``/dev/shm``.
"""

import contextlib
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from hpc_mp.cluster.node.mounts import LOCAL, SHARED, read_mounts, room
from hpc_mp.cluster.node.source import NodeSource, Unavailable
from hpc_mp.doctor.checks.registry import PASSIVE
from tests.machines.tree import row

PRIVATE = ("/proc/self/environ", "/run/", "/tmp/")


@dataclass(frozen=True)
class Recorder(NodeSource):
    """Keeps what it was asked for. ``files``: a path to its text or ``{"link": …}``; ``commands`` as a tree has them."""

    files: dict[str, Any] = field(default_factory=dict)
    commands: dict[str, dict[str, Any]] = field(default_factory=dict)

    def path(self, name: str) -> Path:
        real = self._links(name)
        if Path(real).is_dir():
            self.files.setdefault(f"{real}/.there", "")
        return super().path(name)

    def text(self, name: str) -> str:
        if name.startswith(PRIVATE):
            raise Unavailable(f"{name}: is not recorded")
        text = super().text(name)
        if name == "/proc/mounts":
            text = "\n".join(line for line in text.splitlines()
                             if line.split()[2] in (*LOCAL, *SHARED) or line.split()[1] == "/dev/shm")
        self.files[self._links(name)] = text
        return text

    def names(self, pattern: str) -> tuple[str, ...]:
        found = super().names(pattern)
        if pattern.startswith("/proc/[0-9]*"):
            found = tuple(name for name in found if name.startswith("/proc/1/") or name == "/proc/1")
        for name in found:
            real = self._links(name)
            if Path(real).is_dir():
                self.files.setdefault(f"{real}/.there", "")
            else:
                self.files.setdefault(real, "")
        return found

    def answer(self, argv: Sequence[str]) -> str:
        key = " ".join(argv)
        try:
            out = super().answer(argv)
        except Unavailable as unseen:
            if "is not on PATH" not in str(unseen):
                self.commands[key] = {"code": unseen.code or 1, "out": unseen.out, "err": "" if unseen.out else str(unseen)}
            raise
        self.commands[key] = {"code": 0, "out": out}
        return out

    def _links(self, name: str) -> str:
        """The path without links, after each link on the way was kept."""
        seen = ""
        for part in name.strip("/").split("/"):
            path = f"{seen}/{part}"
            if os.path.islink(path) and path != "/proc/self":
                real = os.path.realpath(path).replace(f"/proc/{os.getpid()}/", "/proc/self/")
                self.files[path] = {"link": os.path.relpath(real, os.path.dirname(path))}
                path = real
            seen = path
        return seen


def main(directory: Path) -> None:
    source = Recorder()
    for check in PASSIVE:
        with contextlib.suppress(Unavailable):
            check.reader(source)
    for mount in read_mounts(source).all:  # they are asked in processes of their own
        room(source, mount.where)
    files = {name: value for name, value in source.files.items()
             if not name.endswith("/.there") or not any(other.startswith(name[:-6]) and other != name for other in source.files)}
    rows = [row(name, value) for name, value in sorted(files.items())]
    directory.mkdir(parents=True, exist_ok=True)
    (directory / "files.toml").write_text("".join(rows), encoding="utf-8")
    (directory / "commands.json").write_text(json.dumps(source.commands, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main(Path(sys.argv[1]))
