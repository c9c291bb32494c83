"""What a GPU of a given name is known to have. Data, as Python, because a node's own interpreter must be able to read it.

Sources: NVIDIA's data sheets (links, PCIe); ``nvidia-smi nvlink -s`` of such GPUs as published (25 GB/s a link on A100, 26.562 on
H100 and H200, 53.125 on Blackwell; the same figures are in NVIDIA's health-validation); host to device floors from Azure's
azurehpc-health-checks (21 GB/s for PCIe 4, 48 for PCIe 5); the number per node is the HGX board's or the compute tray's.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Model:
    """What to expect of one kind of GPU.

    Attributes:
        nvlinks: links per GPU.
        link_rate: GB/s of one link in one direction.
        pcie: generation of the slot; 16 lanes.
        per_node: GPUs of the boards it is sold on; empty where it is sold singly.
        switched: the GPUs of a node are joined by NVSwitches, which a fabric manager sets up.
        rack: the NVLinks leave the node; needs IMEX for memory of other nodes.
        host_copy: GB/s that a copy from pinned host memory reaches at least.
        rows: it remaps rows of memory; older ones retire pages.
    """

    nvlinks: int
    link_rate: float
    pcie: int
    per_node: tuple[int, ...] = ()
    switched: bool = False
    rack: bool = False
    host_copy: float | None = None
    rows: bool = True


MODELS: tuple[tuple[str, Model], ...] = (  # the first whose name is part of the GPU's; longer names before shorter ones
    ("GB300", Model(18, 53.125, 5, (4,), switched=True, rack=True)),
    ("GB200", Model(18, 53.125, 5, (4,), switched=True, rack=True)),
    ("B300", Model(18, 53.125, 6, (8,), switched=True)),
    ("B200", Model(18, 53.125, 5, (8,), switched=True)),
    ("GH200", Model(18, 26.562, 5, (1, 2, 4))),
    ("H200 NVL", Model(18, 26.562, 5, host_copy=48.0)),
    ("H200", Model(18, 26.562, 5, (8,), switched=True, host_copy=48.0)),
    ("H20", Model(18, 26.562, 5, (8,), switched=True, host_copy=48.0)),
    ("H100 80GB HBM3", Model(18, 26.562, 5, (8, 4), switched=True, host_copy=48.0)),
    ("H800", Model(8, 26.562, 5, (8,), switched=True, host_copy=48.0)),
    ("A100-SXM", Model(12, 25.0, 4, (8, 4), switched=True, host_copy=21.0)),
    ("A800-SXM", Model(8, 25.0, 4, (8, 4), switched=True, host_copy=21.0)),
    ("V100-SXM2", Model(6, 25.781, 3, (8, 4), host_copy=9.0, rows=False)),
    ("V100", Model(0, 0.0, 3, host_copy=9.0, rows=False)),
)


def model(name: str) -> Model | None:
    """None for a GPU that is not in the table."""
    return next((known for part, known in MODELS if part in name), None)
