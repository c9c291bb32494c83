"""NVLinks, fabric, IMEX and the ways to the network, broken one by one."""

from __future__ import annotations

from collections.abc import Sequence
from xml.etree import ElementTree

import pytest
from case import Case
from gpu_machines import SMI, answer, findings, ills, of, smi

from hpc_mp.cluster.node.counters import Changes
from hpc_mp.cluster.node.gpu_links import link_counters, read_topology
from hpc_mp.doctor.checks.gpu_nvlink import errors
from tests.machines.tree import broken, tree

STATUS, MATRIX, PEERS, IMEX = "nvidia-smi nvlink -s", "nvidia-smi topo -m", "nvidia-smi topo -p2p n", "nvidia-imex-ctl -H -N"
MANAGER = "systemctl is-active nvidia-fabricmanager"


def links(kind: str, gpu: int, old: str, new: str) -> dict[str, str]:
    """nvidia-smi nvlink -s with this changed at one GPU."""
    parts = answer(kind, STATUS).split("GPU ")
    parts[gpu + 1] = parts[gpu + 1].replace(old, new)
    return {STATUS: "GPU ".join(parts)}


NO_FABRIC = ("fabric/state", "fabric/status", "fabric/cliqueId", "fabric/clusterUuid")
DARK = "NVML: Unable to retrieve NVLink information as all links are inActive"


def dark(kind: str, gpus: Sequence[int], words: str = DARK) -> str:
    """nvidia-smi nvlink -s with these words in place of the links of these GPUs."""
    parts = answer(kind, STATUS).split("GPU ")
    for gpu in gpus:
        parts[gpu + 1] = f"{parts[gpu + 1].splitlines()[0]}\n{words}\n"
    return "GPU ".join(parts)


def pairs(ways: str) -> str:
    """nvidia-smi topo -m of GPUs that are joined so: a row for each."""
    rows = [row.split() for row in ways.splitlines() if row.strip()]
    names = [f"GPU{number}" for number in range(len(rows))]
    return "\n".join("\t".join(cells) for cells in (["", *names, "CPU Affinity"], *(
        [name, *row, "0-31"] for name, row in zip(names, rows, strict=True))))


def matrix(kind: str, argv: str, row: str, change: tuple[str, str], count: int = 1) -> dict[str, str]:
    """A matrix with one row changed."""
    lines = [line.replace(*change, count) if line.strip().startswith(f"{row}\t") else line
             for line in answer(kind, argv).splitlines()]
    return {argv: "\n".join(lines)}


# Boards without a switch: p3.8xlarge and p3.16xlarge (V100), a DGX-1 of P100s, three A6000s with one bridge
_CUBE = """X {1} {1} {2} {2} SYS SYS SYS
{1} X {2} {1} SYS {2} SYS SYS
{1} {2} X {2} SYS SYS {1} SYS
{2} {1} {2} X SYS SYS SYS {1}
{2} SYS SYS SYS X {1} {1} {2}
SYS {2} SYS SYS {1} X {2} {1}
SYS SYS {1} SYS {1} {2} X {2}
SYS SYS SYS {1} {2} {1} {2} X"""
WIRED = ("X NV1 NV1 NV2\nNV1 X NV2 NV1\nNV1 NV2 X NV2\nNV2 NV1 NV2 X", _CUBE.format("", "NV1", "NV2"),
         _CUBE.format("", "NV1", "NV1"), "X NV4 NODE\nNV4 X NODE\nNODE NODE X")


V100 = "/proc/driver/nvidia/gpus/{0001,0002,0003,0004,000b,000c,000d,000e}:00:00.0/information"

CASES = (
    Case("gpu-nvlink-down", "ndv5", links("ndv5", 2, "Link 7: 26.562 GB/s", "Link 7: <inactive>"), "error",
         "1 NVLink inactive: 7", "GPU 2", also=("gpu-nvlink-rate",)),
    Case("gpu-nvlink-down", "p4d", links("p4d", 0, "25 GB/s", "<inactive>"), "error", "12 NVLinks inactive", "GPU 0",
         also=("gpu-nvlink-rate",)),
    *(Case("gpu-nvlink-rate", "ndv5", {STATUS: dark("ndv5", gpus)}, "error", "0 links of 0 GB/s", f"GPU {gpus[-1]}")
      for gpus in ((4,), tuple(range(8)))),  # one GPU of a board, and all
    *(Case("gpu-nvlink-down", "ndv5", {STATUS: dark("ndv5", (4,), f"NVML: {words}")}, "error", words, "GPU 4")
      for words in ("GPU requires reset", "Unknown Error")),
    Case("gpu-nvlink-rate", "ndh200v5", links("ndh200v5", 0, "Link 10: 26.562", "Link 10: 1.562"), "error",
         "18 links of 1.562 GB/s; a NVIDIA H200 has 18 links of 26.562 GB/s", "GPU 0"),
    Case("gpu-nvlink-rate", "gb200", links("gb200", 3, "\t Link 17: 53.125 GB/s\n", ""), "error", "17 links of 53.125", "GPU 3"),
    Case("gpu-nvlink-rate", "p5",
         {STATUS: links("p5", 6, "\t Link 17: 26.562 GB/s\n", "")[STATUS].replace("H100 80GB HBM3", "X1")},
         "error", "most others have 18 links", "GPU 6"),
    Case("gpu-fabric", "ndv5", smi("ndv5", 4, {"fabric/state": "In Progress", "fabric/status": "N/A"}), "error",
         "fabric state In Progress", "GPU 4"),
    Case("gpu-fabric", "p5", smi("p5", 4, {"fabric/status": "Unknown Failure"}), "error", "status Unknown Failure"),
    Case("gpu-fabric", "gb200", smi("gb200", 1, {"fabric/health/summary": "Limited Capacity"}), "warning", "Limited Capacity"),
    Case("gpu-fabric", "gb200", smi("gb200", 1, {"fabric/health/bandwidth": "Degraded"}), "error", "bandwidth Degraded"),
    *(Case("gpu-fabric", "ndv5", smi("ndv5", 4, {"fabric/health/bandwidth": "Full", f"fabric/health/{name}": word}), outcome,
           f"fabric health: {name.replace('_', ' ')} {word}", "GPU 4") for name, word, outcome in (  # R565 to R575: no summary
        ("route_unhealthy", "True", "error"), ("access_timeout_recovery", "True", "warning"),
        ("route_recovery_in_progress", "True", "warning"), ("bandwidth", "Degraded", "error"),
        ("incorrect_configuration", "Incorrect SystemGuid", "error"))),
    Case("gpu-fabric", "gb200", smi("gb200", 2, {"fabric/health/summary": "Unhealthy", "fabric/health/route_unhealthy": "True"}),
         "error", "fabric health: summary Unhealthy, route unhealthy True", "GPU 2"),
    *(Case("gpu-fabric", "gb200", smi("gb200", gpu, dict.fromkeys(NO_FABRIC, "N/A")), "error", "fabric state N/A", "GPU 2")
      for gpu in (2, None)),
    *(Case("gpu-clique", "gb200", smi("gb200", gpu, {"fabric/clusterUuid": uuid}), "error",
           f"cluster UUID {uuid} on GPU {gpu or 0}")
      for gpu in (2, None) for uuid in ("N/A", "00000000-0000-0000-0000-000000000000")),
    Case("gpu-fabric-manager", "p4d", {MANAGER: 3}, "error", "6 NVSwitches and nvidia-fabricmanager is inactive"),
    Case("gpu-fabric-manager", "p4d", {MANAGER: (3, "failed\n")}, "error", "6 NVSwitches and nvidia-fabricmanager is failed"),
    Case("gpu-fabric-manager", "p4d", {MANAGER: None}, "unknown", "systemctl is not on PATH"),
    Case("gpu-imex", "gb200", {IMEX: ("Domain State: UP", "Domain State: DEGRADED")}, "error", "IMEX domain is DEGRADED"),
    Case("gpu-imex", "gb200", {IMEX: ("10.0.4.13          - READY      ", "10.0.4.13          - UNAVAILABLE")}, "error",
         "IMEX node is UNAVAILABLE", "10.0.4.13"),
    Case("gpu-imex", "gb200", {IMEX: matrix("gb200", IMEX, "", ("", ""))[IMEX].replace(
        "       5        C   C", "       5        C   !V!")}, "error", "not connected to node 1 (!V!)", "IMEX node 5"),
    Case("gpu-imex", "gb200", {"/dev/nvidia-caps-imex-channels/channel0": None}, "error", "programs cannot use IMEX"),
    Case("gpu-clique", "gb200", smi("gb200", 2, {"fabric/cliqueId": "32766"}), "error", "GPU 2 (0018:01:00.0)"),
    Case("gpu-clique", "gb200", smi("gb200", None, {"fabric/clusterUuid": "00000000-0000-0000-0000-000000000000"}), "error",
         "belongs to no NVLink domain"),
    Case("gpu-p2p", "ndv5", matrix("ndv5", PEERS, "GPU3", ("OK", "NS"), 7), "error", "7 of 56 paths", "GPU3"),
    Case("gpu-p2p", "ndv4", {PEERS: ("\tOK", "\tNS")}, "error", "no GPU reaches another's memory over NVLink (NS)"),
    Case("gpu-topology", "p5", matrix("p5", MATRIX, "GPU0", ("NV18", "SYS")), "error", "GPU0–GPU1 SYS"),
    Case("gpu-topology", "p5", matrix("p5", MATRIX, "GPU0", ("NV18", "NV17"), 7), "error", "NV17", "GPU0"),
    Case("gpu-nic", "p5", matrix("p5", MATRIX, "GPU2", ("PXB", "NODE"), 4), "warning", "nearest NIC at NODE; 7 other GPUs",
         "GPU2"),
    *(Case("gpu-topology", "ndv4", {MATRIX: pairs(ways)}, "ok", "") for ways in WIRED),
    Case("gpu-topology", "ndv4",  # two NV2 of three would be most of them, and this model needs no equal pairs
         {V100: "Model: \t Tesla V100-SXM2-32GB", MATRIX: pairs("X NV2 NV2\nNV2 X NV1\nNV2 NV1 X")}, "ok", ""),
)


def test_errors_that_grow_and_old_ones_that_do_not() -> None:
    names = [name for name, _ in link_counters(tree("ndv5"))]
    assert len(names) == 8 * 18 * 3
    assert names[0] == "nvlink/GPU 0 link 0 Replay Errors"
    still = errors(Changes(600.0, dict.fromkeys(names, 0), dict.fromkeys(names, 7)))
    assert [finding.severity for finding in still] == ["ok"]
    grown = dict.fromkeys(names, 0) | {"nvlink/GPU 2 link 7 CRC Errors": 9, "nvlink/GPU 2 link 8 Recovery Errors": 1}
    found = list(errors(Changes(600.0, grown, grown)))
    assert [(finding.severity, finding.subject) for finding in found] == [("error", "GPU 2"), ("warning", "GPU 2")]
    assert "link 7 CRC Errors: 9 more within 10 min" in found[0].message


def test_counters_of_healthy_traffic_are_no_errors() -> None:
    """Blackwell counts code words by corrections (FEC bins), bucket 0 being the good ones."""
    names = {name.partition(" link ")[2].split(" ", 1)[1] for name, _ in link_counters(tree("gb200"))}
    assert names == {"Malformed packet Errors", "Buffer overrun Errors", "Rx Errors", "Rx remote Errors", "Rx General Errors",
                     "Local link integrity Errors", "Tx discards", "Link recovery failed events", "Effective Errors",
                     "Symbol Errors"}
    assert not list(link_counters(tree("ethernet")))


@pytest.mark.parametrize("model", ["H100 PCIe", "H100 NVL", "H200 NVL", "RTX A6000"])
def test_cards_without_a_bridge_are_well(model: str) -> None:
    cards = {STATUS: "".join(f"GPU {gpu}: NVIDIA {model} (UUID: GPU-{gpu})\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n"
                             for gpu in (0, 1))}
    found = findings(broken("ndv5", cards))
    assert of(found, "gpu-nvlink-down") == [] == of(found, "gpu-nvlink-rate")


@pytest.mark.parametrize(("model", "rate"), [("RTX A6000", "14.062"), ("A100 80GB PCIe", "25"), ("H100 NVL", "26.562")])
def test_a_card_beside_two_on_a_bridge_is_no_error(model: str, rate: str) -> None:
    ways = f"{rate} GB/s", f"{rate} GB/s", "<inactive>"
    cards = "".join(f"GPU {gpu}: NVIDIA {model} (UUID: GPU-{gpu})\n" + "".join(f"\t Link {link}: {way}\n" for link in range(4))
                    for gpu, way in enumerate(ways))
    found = findings(broken("ndv5", {STATUS: cards}))
    assert [each.severity for each in of(found, "gpu-nvlink-down")] == ["warning"]
    assert all(each.severity == "ok" for each in of(found, "gpu-nvlink-rate"))


@pytest.mark.parametrize("status", [
    f"GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\n{DARK}\n",
    "GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\nNVML: Unable to retrieve Nvlink information as all links are inActive\n",
    "GPU 0: NVIDIA GH200 480GB (UUID: GPU-0)\n" + "".join(f"\t Link {link}: <inactive>\n" for link in range(18)),
    "GPU 0: NVIDIA H100 80GB HBM3 (UUID: GPU-0)\n\t NVML: Unable to retrieve NVLink information: Not Supported\n",
    "GPU 0: NVIDIA RTX A4000 (UUID: GPU-0)\nDevice does not have or support Nvlink\n"])
def test_a_gpu_that_is_alone_needs_no_nvlink(status: str) -> None:
    found = findings(broken("ndv4", {STATUS: status}))
    assert of(found, "gpu-nvlink-down") == [] == of(found, "gpu-nvlink-rate")


@pytest.mark.parametrize("gpus", [(5,), (0, 1, 2, 3, 4, 5, 6, 7)])
def test_gpus_in_mig_mode_need_no_nvlink(gpus: tuple[int, ...]) -> None:
    modes = ElementTree.fromstring(answer("ndv5", SMI))
    for index in gpus:
        modes.findall("gpu")[index].find("mig_mode/current_mig").text = "Enabled"  # type: ignore[union-attr]
    ways = "\n".join(" ".join("X" if one == other else "SYS" if {one, other} & set(gpus) else "NV18" for other in range(8))
                     for one in range(8))
    edits = {SMI: ElementTree.tostring(modes, encoding="unicode"), STATUS: dark("ndv5", gpus), MATRIX: pairs(ways),
             PEERS: pairs(ways.replace("SYS", "NS").replace("NV18", "OK"))}
    assert set(ills(findings(broken("ndv5", edits)))) == {"gpu-mig"}


def test_an_older_matrix_names_its_devices_in_the_head() -> None:
    text = ("\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tPIX\t0-23\nGPU1\tNV12\t X \tSYS\t24-47\n"
            "mlx5_0\tPIX\tSYS\t X \t\n")
    told = read_topology(broken("ndv4", {MATRIX: text}))
    assert told is not None
    assert told.gpus == ("GPU0", "GPU1")
    assert told.nics == {"mlx5_0": "mlx5_0"}
    assert told.paths["GPU1", "mlx5_0"] == "SYS"
