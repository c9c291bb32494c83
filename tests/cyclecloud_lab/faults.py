"""Faults of a machine that its doctor must see."""

from .site import Machine


def infiniband(machine: Machine, state: str = "1: DOWN") -> None:
    """A port in /sys/class of the machine, until `no_infiniband`."""
    port = "/run/class/infiniband/mlx5_ib0/ports/1"
    machine.ask("bash", "-c", "cp -a /sys/class /run/class 2>/dev/null; mount --bind /run/class /sys/class")
    for name, text in {"state": state, "phys_state": "3: Disabled", "link_layer": "InfiniBand",
                       "rate": "400 Gb/sec (4X NDR)"}.items():  # fmt: skip
        machine.write(f"{port}/{name}", f"{text}\n")


def no_infiniband(machine: Machine) -> None:
    machine.ask("umount", "/sys/class")
