"""The machines whose GPU part ``rebuild_gpu.py`` writes; it names the sources."""

from __future__ import annotations

from dataclasses import dataclass, field


@dataclass(frozen=True)
class Kind:
    """One machine. ``rails``: NICs on a GPU's own PCIe switch, by GPU; empty where the switches are hidden."""

    name: str
    product: str
    device: str
    driver: str
    buses: tuple[str, ...]
    numa: tuple[int, ...]
    memory: int
    links: int
    rate: str
    pcie: int
    clocks: tuple[int, int]
    power: int
    nics: tuple[tuple[str, int], ...]  # name, NUMA node
    switches: tuple[str, ...] = ()
    switch_device: str = ""
    hopper: bool = True
    cluster: str = ""
    library: str = "x86_64-linux-gnu"
    rails: dict[int, tuple[int, ...]] = field(default_factory=dict)


def _azure(domains: str) -> tuple[str, ...]:
    return tuple(f"00{domain}:00:00.0" for domain in domains.split())


AN0 = (("mlx5_an0", 0),)
KINDS = (
    Kind("ndv4", "NVIDIA A100-SXM4-40GB", "0x20b0", "535.161.08", _azure("01 02 03 04 0b 0c 0d 0e"), (1, 1, 0, 0, 3, 3, 2, 2),
         40960,
         12, "25 GB/s", 4, (1410, 1215), 400,
         tuple((f"mlx5_ib{index}", numa) for index, numa in enumerate((1, 1, 0, 0, 3, 3, 2, 2))),
         _azure("05 06 07 08 09 0a"), "0x1af1", hopper=False),
    Kind("ndv5", "NVIDIA H100 80GB HBM3", "0x2330", "535.161.08", _azure("01 02 03 08 09 0a 0b 0c"), (0, 0, 0, 0, 1, 1, 1, 1),
         81559,
         18, "26.562 GB/s", 5, (1980, 2619), 700,
         tuple((f"mlx5_ib{index}", index // 4) for index in range(8)) + AN0, _azure("04 05 06 07"), "0x22a3"),
    Kind("ndh200v5", "NVIDIA H200", "0x2335", "550.90.07", _azure("01 02 03 08 09 0a 0b 0c"), (0, 0, 0, 0, 1, 1, 1, 1), 143771,
         18, "26.562 GB/s", 5, (1980, 3201), 700,
         tuple((f"mlx5_ib{index}", index // 4) for index in range(8)) + AN0, _azure("04 05 06 07"), "0x22a3"),
    Kind("p4d", "NVIDIA A100-SXM4-40GB", "0x20b0", "535.161.08",
         tuple(f"0000:{bus}:1{slot}.0" for bus in ("10", "20", "90", "a0") for slot in "cd"), (0, 0, 0, 0, 1, 1, 1, 1), 40960,
         12, "25 GB/s", 4, (1410, 1215), 400,
         (("rdmap16s27", 0), ("rdmap32s27", 0), ("rdmap144s27", 1), ("rdmap160s27", 1)),
         tuple(f"0000:c0:1{slot}.0" for slot in "89abcd"), "0x1af1", hopper=False),
    Kind("p5", "NVIDIA H100 80GB HBM3", "0x2330", "550.90.07",
         tuple(f"0000:{bus}:00.0" for bus in ("53", "64", "75", "86", "97", "a8", "b9", "ca")), (0, 0, 0, 0, 1, 1, 1, 1), 81559,
         18, "26.562 GB/s", 5, (1980, 2619), 700,
         tuple((f"rdmap{79 + 17 * (index // 4) + index % 4}s0", index // 16) for index in range(32)),
         tuple(f"0000:{bus}:00.0" for bus in ("d8", "d9", "da", "db")), "0x22a3",
         rails={gpu: tuple(range(4 * gpu, 4 * gpu + 4)) for gpu in range(8)}),
    Kind("gb200", "NVIDIA GB200", "0x2941", "570.158.01", ("0008:01:00.0", "0009:01:00.0", "0018:01:00.0", "0019:01:00.0"),
         (0, 0, 1, 1), 189471, 18, "53.125 GB/s", 5, (2062, 3996), 1200,
         (("mlx5_ib0", 0), ("mlx5_ib1", 0), ("mlx5_ib2", 1), ("mlx5_ib3", 1)),
         cluster="7f3c2a10-5b4e-4d6a-9c1e-2b8f0e6d4a91", library="aarch64-linux-gnu"),
)
