"""One fault as a survey names it."""

from __future__ import annotations

from dataclasses import dataclass

LINK = "–"  # between the two ends of a link


@dataclass(frozen=True, slots=True)
class Diagnosis:
    """One fault.

    Attributes:
        code: its kind, stable: a key of ``REMEDIES``.
        members: nodes, leaf switches, "n3 rail 1", or links "n1–n3". More than one are an honest set: one of these.
        certain: the evidence suffices for the one member. Otherwise it is a suspicion.
        evidence: what was measured, and against what.
    """

    code: str
    members: tuple[str, ...]
    certain: bool
    evidence: str
    factor: float | None = None

    @property
    def remedy(self) -> str:
        return REMEDIES[self.code]

    @property
    def subject(self) -> str:
        """In words: ``n3``, ``n2 or n3``."""
        return " or ".join(self.members)


REMEDIES = {
    "node-down": "drain it; look at its power, console and cable",
    "node-cut": "drain it; look at its data network's cable, addresses and firewall",
    "node-slow": "drain it; look at its cable, its port's rate and its switch port's errors",
    "node-loss": "drain it; replace its cable or transceiver, and look at its switch port's error counters",
    "node-mtu": "set the interface's MTU to that of the others",
    "node-cpu": "drain it; look for a CPU quota, a power cap, heat, and processes that others have left behind",
    "node-corrupt": "drain it at once: its results cannot be trusted; test its CPU and memory",
    "rail-slow": "look at this network card's cable, PCIe width and switch port",
    "uplink-slow": "look for a broken or missing cable between this leaf switch and the spine",
    "uplink-loss": "replace the cables between this leaf switch and the spine; look at its ports' error counters",
    "uplink-mtu": "set the MTU of this leaf switch's uplink to that of the others",
    "link-slow": "look at the routes and switch ports between the two",
    "link-loss": "look at the routes and switch ports between the two",
    "link-mtu": "look for a switch port with a smaller MTU between the two",
    "link-cut": "look at firewall, routes and switch ports between the two",
}
