"""Detection of the platform of a machine by firmware, GPUs, network adapters and their link layers.

Machine types are rows of the catalogue and name their profile. A profile's own marks apply to any machine on such a network.
"""

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType, Marks, catalogue
from hpc_mp.environment.machine import Shown
from hpc_mp.environment.profiles import Detect, Profile, load_profiles


@dataclass(frozen=True, slots=True)
class Platform:
    """A detected platform. ``name``: the matching profile, or None; ``evidence``: the observed facts."""

    name: str | None
    evidence: tuple[str, ...]


def platform(machine: Shown, profiles: Sequence[Profile] | None = None) -> Platform:
    """Return the matching platform of the lowest rank, among profiles whose marks all match and the catalogue's machine types."""
    candidates = load_profiles() if profiles is None else profiles
    names = {profile.name for profile in candidates}
    fitting = [(profile.detect.rank, profile.name) for profile in candidates
               if profile.detect is not None and fits(profile.detect, machine)]
    fitting += [(kind.marks.rank, kind.profile) for kind in catalogue().machines.values()
                if kind.marks is not None and kind.profile in names and is_one(kind, kind.marks, machine)]
    return Platform(min(fitting)[1] if fitting else None, tuple(_evidence(machine)))


def fits(criteria: Detect, machine: Shown) -> bool:
    return all((
        criteria.vendor is None or re.match(criteria.vendor, machine.vendor),
        criteria.gpus is None or (bool(machine.gpus) and all(re.fullmatch(criteria.gpus, gpu) for gpu in machine.gpus)),
        len(machine.gpus) >= criteria.least_gpus,
        criteria.layer is None or bool(machine.devices(criteria.layer)),
        not criteria.efa or bool(machine.efa),
        not criteria.cxi or bool(machine.cxi),
    ))


def is_one(kind: MachineType, marks: Marks, machine: Shown) -> bool:
    """Return True if the machine is a complete one of that type: firmware, all its GPUs, and the marks of its network."""
    drivers = Counter(machine.drivers)
    devices = {f"{kind.gpu_vendor} {device}" for device in kind.gpu.pci} if kind.gpu else set()
    return all((
        re.match(marks.vendor, machine.vendor),
        not marks.product or re.fullmatch(marks.product, machine.product),
        len(machine.gpus) >= kind.gpus,
        not devices or devices.issuperset(machine.gpus),
        all(drivers[name] >= least for name, least in marks.drivers.items()),
        not marks.layer or bool(machine.devices(marks.layer)),
        not marks.efa or bool(machine.efa),
    ))


def _evidence(machine: Shown) -> Iterator[str]:
    firmware = " ".join(filter(None, (machine.vendor, machine.product)))
    yield f"firmware: {firmware}" if firmware else "firmware: not shown"
    yield from (f"GPUs: {count} × {gpu}" for gpu, count in Counter(machine.gpus).items())
    if not machine.gpus:
        yield "GPUs: none on the PCI bus"
    for layer in ("InfiniBand", "Ethernet"):
        if devices := machine.devices(layer):
            yield f"RDMA over {layer}: {', '.join(devices)}"
    for network, adapters in (("EFA", machine.efa), ("Slingshot", machine.cxi)):
        if adapters:
            yield f"{network}: {len(adapters)} ({adapters[0]} …)"
    drivers = Counter(filter(None, machine.drivers))
    if drivers:
        yield f"network drivers: {', '.join(f'{count} × {name}' for name, count in sorted(drivers.items()))}"
