"""Checks of disks and file systems."""

from collections.abc import Iterator

from hpc_mp.base.text import data_size
from hpc_mp.cluster.node.mounts import Disks, Mounts, read_disks, read_mounts
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well

_FULL = 0.95
_NO_ROOM = 100 << 20
_STOPPED = {"emergency_ro", "shutdown"}  # ext4 since Linux 6.15: an error has stopped it although its options still list rw


def answers(mounts: Mounts) -> Iterator[Judgement]:
    for mount in mounts.all:
        what = f"{mount.type} from {mount.device}"
        if not isinstance(mount.room, Unavailable):
            yield Judgement("ok", f"{what} answers", mount.where)
        elif "Permission denied" in str(mount.room):
            yield Judgement("ok", f"{what}: not for this user", mount.where)
        elif "Stale" in str(mount.room):
            yield Judgement("error", f"{what}: {mount.room}", mount.where, f"umount -l {mount.where}, and mount it again")
        else:
            yield Judgement("unknown", f"{what}: {mount.room}", mount.where)


def space(mounts: Mounts) -> Iterator[Judgement]:
    for mount in mounts.all:
        room = mount.room
        if isinstance(room, Unavailable) or not room.size:
            continue
        used = 1 - room.free / room.size
        local_root = mount.where in ("/", "/tmp", "/var", "/var/tmp") and room.free < _NO_ROOM
        yield Judgement("error" if local_root else "warning" if used >= _FULL else "ok",
                        f"{used:.0%} of {data_size(room.size)} are used, {data_size(room.free)} are left", mount.where)


def inodes(mounts: Mounts) -> Iterator[Judgement]:
    for mount in mounts.all:
        room = mount.room
        if not isinstance(room, Unavailable) and room.files:
            used = 1 - room.free_files / room.files
            yield Judgement("warning" if used >= _FULL else "ok", f"{used:.0%} of {room.files} inodes are used", mount.where)


def readonly(mounts: Mounts) -> Iterator[Judgement]:
    for mount in mounts.all:
        if mount.shared or not mount.device.startswith("/dev/") or "loop" in mount.device:
            continue
        stopped = [option for option in mount.options if option in _STOPPED]
        fell = "ro" in mount.options and any(option.startswith("errors=") for option in mount.options)
        wrong = stopped or ("ro" in mount.options and (mount.where in ("/", "/tmp", "/var", "/home") or fell))
        yield Judgement("error" if wrong else "ok", f"mounted {','.join(dict.fromkeys([*mount.options[:3], *stopped]))}",
                        mount.where)


def missing(mounts: Mounts) -> Iterator[Judgement]:
    lost = (Judgement("error", f"/etc/fstab has it ({type_}), it is not mounted", where)
            for where, type_ in mounts.missing.items())
    yield from or_well(lost, "all that /etc/fstab has is mounted")


def controllers(disks: Disks) -> Iterator[Judgement]:
    dead = (Judgement("error", f"{disks.models[name]}: {state}", name)
            for name, state in disks.controllers.items() if state != "live")
    yield from or_well(dead, f"{len(disks.controllers)} controllers are live" if disks.controllers else "")


def count(disks: Disks) -> Iterator[Judgement]:
    if disks.kind is None or disks.kind.disks is None:
        return
    own_disks = sum("Elastic Block" not in disks.models[name] and "MSFT NVMe Accelerator" not in disks.models[name]
                    for name in disks.controllers)
    good = own_disks >= disks.kind.disks
    yield Judgement("ok" if good else "warning", f"{own_disks} disks of its own; a {disks.kind.name} has {disks.kind.disks}")


def arrays(disks: Disks) -> Iterator[Judgement]:
    for name, array in disks.arrays.items():
        good = array.active and array.present == array.expected
        yield Judgement("ok" if good else "error",
                        f"{array.present} of {array.expected} disks" + ("" if array.active else "; it is inactive"), name)


CHECKS = (
    *checks_of(read_mounts, {
        "mount-hung": answers,
        "mount-missing": missing,
        "mount-readonly": readonly,
        "disk-space": space,
        "disk-inodes": inodes,
    }),
    *checks_of(read_disks, {"nvme-state": controllers, "nvme-count": count, "disk-raid": arrays}),
)
