"""File systems and disks: mounts, whether they answer, and their free room; NVMe controllers and software RAID."""

import functools
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.deadline import in_time
from hpc_mp.cluster.node.gpu_pci import read_machine_type
from hpc_mp.cluster.node.source import NodeSource, Unavailable, keep, maybe

_PATIENCE_S = 2.0  # for all file systems together
LOCAL = ("ext2", "ext3", "ext4", "xfs", "btrfs", "zfs", "f2fs", "vfat")
SHARED = ("nfs", "nfs4", "lustre", "gpfs", "beegfs", "ceph", "cifs", "smb3", "fuse.ceph", "fuse.glusterfs", "fuse.weka", "wekafs",
          "panfs", "pvfs2", "orangefs", "9p", "virtiofs", "fuse.blobfuse2", "fuse.amlfs", "fuse.sshfs", "efs")
_ESCAPE = re.compile(r"\\([0-7]{3})")


@dataclass(frozen=True)
class Room:
    """The size of a file system, in bytes and files; ``files`` is 0 if it does not count them."""

    size: int
    free: int
    files: int
    free_files: int


@dataclass(frozen=True)
class Mount:
    """A mounted file system. ``room`` is Unavailable with the reason if it did not answer in time, or refused."""

    device: str
    where: str
    type: str
    options: tuple[str, ...]
    room: Room | Unavailable

    @property
    def shared(self) -> bool:
        return self.type in SHARED


@dataclass(frozen=True)
class Mounts:
    """All mounts. ``missing``: mounts that ``/etc/fstab`` requires at start and that do not exist."""

    all: tuple[Mount, ...]
    missing: Mapping[str, str]


def read_mounts(source: NodeSource) -> Mounts:
    """Read disks and network file systems; each is queried in a separate process. Raises Unavailable."""
    rows = mount_table(source)
    last = {where: (device, type_, options.split(",")) for device, where, type_, options in rows
            if type_ in LOCAL or type_ in SHARED}
    queries = {where: functools.partial(room, source, where) for where in last}
    rooms = in_time(queries, _PATIENCE_S, keep(source, "hung-mounts.json"))
    mounts = tuple(Mount(device, where, type_, tuple(options), rooms[where])
                   for where, (device, type_, options) in sorted(last.items()))
    everywhere = {where for _, where, *_ in rows}
    return Mounts(mounts, {where: type_ for where, type_ in _promised(source).items() if where not in everywhere})


def mount_table(source: NodeSource) -> list[tuple[str, str, str, str]]:
    """Return device, mount point, type and options of every mount, in order: of two on one path the last hides the first. Raises
    Unavailable."""
    rows = (line.split()[:4] for line in source.text("/proc/mounts").splitlines())
    return [(device, _plain(where), type_, options) for device, where, type_, options in rows]


def type_at(source: NodeSource, path: str | Path) -> str:
    """Return the type of the file system that contains a path, its symlinks resolved; empty if the mounts cannot be read."""
    try:
        types = {where: type_ for _, where, type_, _ in mount_table(source)}
    except Unavailable:
        return ""
    return types.get(max(filter(Path(path).resolve().is_relative_to, types), key=len, default=""), "")


def room(source: NodeSource, where: str) -> Room:
    """Return the room of a file system. It is queried by a program, so that a recorded machine can answer. Raises Unavailable."""
    values = source.answer(("stat", "-f", "-c", "%S %b %a %c %d", where)).split()
    try:
        block, blocks, free, files, free_files = map(int, values)
    except ValueError:
        raise Unavailable(f"stat -f prints {' '.join(values)!r}") from None
    return Room(block * blocks, block * free, files, free_files)


def _promised(source: NodeSource) -> dict[str, str]:
    """Return the mount points in ``/etc/fstab`` that are mounted at start, with their types."""
    types = {}
    for line in (maybe(source.text, "/etc/fstab") or "").splitlines():
        words = line.split("#")[0].split()
        if len(words) >= 4 and words[1].startswith("/") and not {"noauto", "nofail"} & set(words[3].split(",")):
            types[os.path.normpath(_plain(words[1]))] = words[2]
    return types


def _plain(path: str) -> str:
    """Decode blanks, which are written as ``\\040``."""
    return _ESCAPE.sub(lambda match: chr(int(match[1], 8)), path)


_ARRAY = re.compile(r"^(md\S*) : (\w+)(.*)\n(.*)", re.MULTILINE)


@dataclass(frozen=True)
class Array:
    """A software RAID. ``expected``, ``present``: the number of disks that it should have, and the number that it has."""

    active: bool
    expected: int
    present: int


@dataclass(frozen=True)
class Disks:
    """NVMe controllers and software RAIDs."""

    controllers: Mapping[str, str]  # NVMe controllers to their state: ``live``, ``resetting``, ``dead`` …
    models: Mapping[str, str]  # likewise, to their model
    arrays: Mapping[str, Array]
    kind: MachineType | None


def read_disks(source: NodeSource) -> Disks:
    """Read the disks. Never raises."""
    paths = source.names("/sys/class/nvme/nvme[0-9]*")
    return Disks(
        controllers={path.rpartition("/")[2]: maybe(source.text, f"{path}/state") or "unknown" for path in paths},
        models={path.rpartition("/")[2]: maybe(source.text, f"{path}/model") or "" for path in paths},
        arrays=_arrays(maybe(source.text, "/proc/mdstat") or ""),
        kind=read_machine_type(source),
    )


def _arrays(text: str) -> dict[str, Array]:
    """Return the arrays in ``/proc/mdstat``. A firmware RAID's container is never active; its volumes are
    (``external:/md127/0``)."""
    arrays = {}
    for name, state, members, detail in _ARRAY.findall(text):
        count = re.search(r"\[(\d+)/(\d+)\]", detail)
        disks = len(re.findall(r"\[\d+\](?!\(S\))", members))  # an array without redundancy shows no count
        expected, present = (int(count[1]), int(count[2])) if count else (disks, disks - members.count("(F)"))
        arrays[name] = Array(state == "active" or f"external:/{name}/" in text, expected, present)
    return arrays
