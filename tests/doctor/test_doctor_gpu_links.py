"""NVLinks, fabric, IMEX and the ways to the network, broken one by one."""

from __future__ import annotations

import pytest
from gpu_machines import Case, answer, findings, of, smi

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


def matrix(kind: str, argv: str, row: str, change: tuple[str, str], count: int = 1) -> dict[str, str]:
    """A matrix with one row changed."""
    lines = [line.replace(*change, count) if line.strip().startswith(f"{row}\t") else line
             for line in answer(kind, argv).splitlines()]
    return {argv: "\n".join(lines)}


CASES = (
    Case("gpu-nvlink-down", "ndv5", links("ndv5", 2, "Link 7: 26.562 GB/s", "Link 7: <inactive>"), "error",
         "1 NVLink inactive: 7", "GPU 2", also=frozenset({"gpu-nvlink-rate"})),
    Case("gpu-nvlink-down", "p4d", links("p4d", 0, "25 GB/s", "<inactive>"), "error", "12 NVLinks inactive", "GPU 0",
         also=frozenset({"gpu-nvlink-rate"})),
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
    Case("gpu-fabric", "gb200", smi("gb200", 1, {"fabric/health/bandwidth": "Degraded"}), "error", "bandwidth degraded"),
    Case("gpu-fabric-manager", "p4d", {MANAGER: 3}, "error", "6 NVSwitches and nvidia-fabricmanager is inactive"),
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
)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_broken(case: Case) -> None:
    case.holds()


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


def test_cards_without_a_bridge_are_well() -> None:
    cards = {STATUS: "GPU 0: NVIDIA H100 PCIe (UUID: GPU-1)\n\t Link 0: <inactive>\n\t Link 1: <inactive>\n"}
    found = findings(broken("ndv5", cards))
    assert of(found, "gpu-nvlink-down") == [] == of(found, "gpu-nvlink-rate")


def test_an_older_matrix_names_its_devices_in_the_head() -> None:
    text = ("\t\x1b[4mGPU0\tGPU1\tmlx5_0\tCPU Affinity\x1b[0m\nGPU0\t X \tNV12\tPIX\t0-23\nGPU1\tNV12\t X \tSYS\t24-47\n"
            "mlx5_0\tPIX\tSYS\t X \t\n")
    told = read_topology(broken("ndv4", {MATRIX: text}))
    assert told is not None
    assert told.gpus == ("GPU0", "GPU1")
    assert told.nics == {"mlx5_0": "mlx5_0"}
    assert told.paths["GPU1", "mlx5_0"] == "SYS"
