"""Which platform a machine is, from what it shows: firmware, GPUs, network adapters and their link layers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from hpc_mp.environment.machine import Shown
from hpc_mp.environment.profiles import Detect, Profile, load_profiles


@dataclass(frozen=True, slots=True)
class Platform:
    """``name`` of the profile that fits, None without one; ``evidence``: what the machine shows."""

    name: str | None
    evidence: tuple[str, ...]


def platform(machine: Shown, profiles: Sequence[Profile] | None = None) -> Platform:
    """The first profile, by rank, all of whose marks the machine has."""
    known = load_profiles() if profiles is None else profiles
    fitting = [(each.detect.rank, each.name) for each in known if each.detect is not None and fits(each.detect, machine)]
    return Platform(min(fitting)[1] if fitting else None, tuple(_evidence(machine)))


def fits(wanted: Detect, machine: Shown) -> bool:
    drivers = Counter(machine.drivers)
    return all((
        wanted.vendor is None or re.match(wanted.vendor, machine.vendor),
        wanted.gpus is None or (bool(machine.gpus) and all(re.fullmatch(wanted.gpus, gpu) for gpu in machine.gpus)),
        len(machine.gpus) >= wanted.least_gpus,
        all(drivers[name] >= least for name, least in wanted.drivers.items()),
        wanted.layer is None or bool(machine.devices(wanted.layer)),
        not wanted.efa or bool(machine.efa),
        not wanted.cxi or bool(machine.cxi),
    ))


def _evidence(machine: Shown) -> Iterator[str]:
    named = " ".join(filter(None, (machine.vendor, machine.product)))
    yield f"firmware: {named}" if named else "firmware: not shown"
    yield from (f"GPUs: {count} × {gpu}" for gpu, count in Counter(machine.gpus).items())
    if not machine.gpus:
        yield "GPUs: none on the PCI bus"
    for layer in ("InfiniBand", "Ethernet"):
        if devices := machine.devices(layer):
            yield f"RDMA over {layer}: {', '.join(devices)}"
    for words, found in (("EFA", machine.efa), ("Slingshot", machine.cxi)):
        if found:
            yield f"{words}: {len(found)} ({found[0]} …)"
    drivers = Counter(filter(None, machine.drivers))
    if drivers:
        yield f"network drivers: {', '.join(f'{count} × {name}' for name, count in sorted(drivers.items()))}"
