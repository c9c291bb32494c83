"""What ibnetdiscover prints of a planned fabric, in the form of ibnetdiscover(8)."""

from collections.abc import Sequence

Cable = tuple[str, str]  # two of the switches and adapters


class Fabric:
    """Switches and adapters with descriptions, and the cables between them."""

    def __init__(self) -> None:
        self.names: dict[str, str] = {}
        self.cables: list[Cable] = []

    def add(self, kind: str, description: str) -> str:
        """A switch ("S") or an adapter ("H"); its identity."""
        identity = f"{kind}-{len(self.names) + 0xec0d9a0300000000:016x}"
        self.names[identity] = description
        return identity

    def cable(self, *ends: str) -> None:
        self.cables.append((ends[0], ends[1]))

    def text(self) -> str:
        lines = ["#", "# Topology file: generated on Mon Dec 18 12:34:08 2023", "#"]
        for here, name in self.names.items():
            ports = [(self._port(here, cable), *(end for end in cable if end != here), cable)
                     for cable in self.cables if here in cable]
            guid = here[2:].lstrip("0")
            if here.startswith("S"):
                lines += ["", f"switchguid=0x{guid}({guid})",
                          f'Switch\t41 "{here}"\t\t# "{name}" enhanced port 0 lid 1 lmc 0']
                lines += [f'[{port}]\t"{other}"[{self._port(other, cable)}]'
                          + (f"({other[2:]}) " if other.startswith("H") else "") + f'\t\t# "{self.names[other]}" lid 2 4xHDR'
                          for port, other, cable in ports]
            else:
                lines += ["", f"caguid=0x{guid}", f'Ca\t1 "{here}"\t\t# "{name}"']
                lines += [f'[{port}]({here[2:]}) \t"{other}"[{self._port(other, cable)}]'
                          f'\t\t# lid 2 lmc 0 "{self.names[other]}" lid 1 4xHDR' for port, other, cable in ports]
        return "\n".join(lines) + "\n"

    def _port(self, end: str, cable: Cable) -> int:
        return 1 + [each for each in self.cables if end in each].index(cable)


def clos(pods: Sequence[Sequence[Sequence[str]]], rails: int = 1, spines: int = 2, named: bool = True) -> Fabric:
    """Pods of leaves of hosts: every leaf is ``rails`` switches, a host hangs at each; spines join the leaves of a pod, cores
    the spines."""
    fabric = Fabric()
    cores = [fabric.add("S", "Quantum Mellanox Technologies") for _ in range(2 if len(pods) > 1 else 0)]
    leaf_number = 0
    for pod in pods:
        above = [fabric.add("S", "Quantum Mellanox Technologies") for _ in range(spines if len(pod) > 1 or cores else 0)]
        for spine in above:
            for core in cores:
                fabric.cable(spine, core)
        for hosts in pod:
            leaf_number += 1
            leaf = [fabric.add("S", f"MF0;leaf{leaf_number:02}r{rail}:MQM8700/U1" if named else "Quantum Mellanox Technologies")
                    for rail in range(rails)]
            for switch in leaf:
                for spine in above:
                    fabric.cable(switch, spine)
                _engine(fabric, switch)
            for host in hosts:
                for rail, switch in enumerate(leaf):
                    fabric.cable(fabric.add("H", f"{host} mlx5_{rail}"), switch)
    return fabric


def _engine(fabric: Fabric, switch: str) -> None:
    """The SHARP engine that every switch shows as an adapter."""
    fabric.cable(fabric.add("H", "Mellanox Technologies Aggregation Node"), switch)
