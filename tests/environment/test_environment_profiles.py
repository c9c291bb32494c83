"""Every profile against a table typed from section C of the study (and, where the sources say otherwise, from these)."""

from __future__ import annotations

from typing import Any

import pytest
from machines.tree import KINDS, tree

from hpc_mp.base.errors import HpcMpError
from hpc_mp.environment.apply import apply
from hpc_mp.environment.facts import facts
from hpc_mp.environment.machine import Shown
from hpc_mp.environment.profiles import Profile, load_profile, load_profiles, profile_names
from hpc_mp.environment.versions import holds, release, versions

# (use, variable, value), in the order of the profile. FOUND: on the node.
FOUND = object()
IMAGE, JOB, OPTIONAL, BENCH, LEAVE = "image", "job", "optional", "bench", "leave"
NDV5 = [(IMAGE, "NCCL_IB_PCI_RELAXED_ORDERING", "1"), (IMAGE, "NCCL_TOPO_FILE", "/opt/microsoft/ndv5/topo.xml"),
        (OPTIONAL, "NCCL_TOPO_FILE", ""), (IMAGE, "NCCL_IGNORE_CPU_AFFINITY", "1")]
GOLDEN: dict[str, list[tuple[str, str, Any]]] = {
    "azure-ndv4": [
        (IMAGE, "NCCL_IB_PCI_RELAXED_ORDERING", "1"), (IMAGE, "NCCL_TOPO_FILE", "/opt/microsoft/ndv4/topo.xml"),
        (IMAGE, "NCCL_IGNORE_CPU_AFFINITY", "1"),
        (JOB, "CUDA_DEVICE_ORDER", "PCI_BUS_ID"), (JOB, "NCCL_SOCKET_IFNAME", "eth0"),
        (JOB, "NCCL_IB_HCA", "mlx5_ib"), (OPTIONAL, "NCCL_IB_HCA", "^mlx5_an0"),
        # "rc (or tcp), UCX_NET_DEVICES=eth0 for bootstrap": rc cannot use eth0, and the image's tests pair tcp with it
        (JOB, "UCX_TLS", "tcp"), (OPTIONAL, "UCX_TLS", "rc"), (JOB, "UCX_NET_DEVICES", "eth0"),
        (OPTIONAL, "UCX_IB_PCI_RELAXED_ORDERING", "on"), (OPTIONAL, "NCCL_COLLNET_ENABLE", "0")],
    "azure-ndv5": NDV5,
    "azure-ndh200v5": [*NDV5, (JOB, "NCCL_IB_HCA", "^mlx5_an0")],
    "azure-gb200": [
        (LEAVE, "NCCL_MNNVL_ENABLE", ""), (BENCH, "NCCL_SOCKET_IFNAME", "eth0"), (BENCH, "UCX_TLS", "rc"),
        (BENCH, "UCX_IB_GID_INDEX", "0"), (BENCH, "NCCL_NET_GDR_LEVEL", "5")],
    # the image also ignores CPU affinity on these two: components/customizations/{ndv2,ncv4}.sh
    "azure-ndv2": [(IMAGE, "NCCL_TOPO_FILE", "/opt/microsoft/ndv2/topo.xml"), (IMAGE, "NCCL_IGNORE_CPU_AFFINITY", "1")],
    "azure-ncv4": [(IMAGE, "NCCL_TOPO_FILE", "/opt/microsoft/ncv4/topo.xml"),
                   (IMAGE, "NCCL_GRAPH_FILE", "/opt/microsoft/ncv4/graph.xml"), (IMAGE, "NCCL_IGNORE_CPU_AFFINITY", "1")],
    "aws-efa": [
        (JOB, "NCCL_SOCKET_IFNAME", "^docker,lo,veth"), (OPTIONAL, "FI_EFA_USE_HUGE_PAGE", "0"),
        (OPTIONAL, "NCCL_TUNER_PLUGIN", "libnccl-ofi-tuner.so"), (BENCH, "NCCL_BUFFSIZE", "8388608"),
        (BENCH, "NCCL_P2P_NET_CHUNKSIZE", "524288"),
        (JOB, "FI_EFA_USE_DEVICE_RDMA", "1"), (JOB, "FI_PROVIDER", "efa")],
    "gcp-a3-high": [(JOB, name, value) for name, value in {
        "NCCL_NET": "GPUDirectTCPX_v7", "NCCL_SOCKET_IFNAME": "enp0s12", "NCCL_GPUDIRECTTCPX_CTRL_DEV": "enp0s12",
        "NCCL_GPUDIRECTTCPX_SOCKET_IFNAME": "enp6s0,enp12s0,enp134s0,enp140s0", "NCCL_CROSS_NIC": "0", "NCCL_ALGO": "Ring",
        "NCCL_PROTO": "Simple", "NCCL_NSOCKS_PERTHREAD": "4", "NCCL_SOCKET_NTHREADS": "1", "NCCL_DYNAMIC_CHUNK_SIZE": "524288",
        "NCCL_P2P_NET_CHUNKSIZE": "524288", "NCCL_P2P_PCI_CHUNKSIZE": "524288", "NCCL_P2P_NVL_CHUNKSIZE": "1048576",
        "NCCL_BUFFSIZE": "4194304", "NCCL_NET_GDR_LEVEL": "PIX", "NCCL_P2P_PXN_LEVEL": "0",
        "NCCL_GPUDIRECTTCPX_UNIX_CLIENT_PREFIX": "/run/tcpx-$SLURM_JOB_ID",
        "NCCL_GPUDIRECTTCPX_PROGRAM_FLOW_STEERING_WAIT_MICROS": "500000",
        "NCCL_GPUDIRECTTCPX_TX_BINDINGS":
            "enp6s0:8-21,112-125;enp12s0:8-21,112-125;enp134s0:60-73,164-177;enp140s0:60-73,164-177",
        "NCCL_GPUDIRECTTCPX_RX_BINDINGS":
            "enp6s0:22-35,126-139;enp12s0:22-35,126-139;enp134s0:74-87,178-191;enp140s0:74-87,178-191",
        "LD_LIBRARY_PATH": "/var/lib/tcpx/lib64"}.items()],
    "gcp-a3-mega": [
        (JOB, "NCCL_NET", "FasTrak"), (JOB, "NCCL_FASTRAK_CTRL_DEV", "enp0s12"), (JOB, "NCCL_SOCKET_IFNAME", "enp0s12"),
        (JOB, "NCCL_FASTRAK_IFNAME", "enp6s0,enp7s0,enp13s0,enp14s0,enp134s0,enp135s0,enp141s0,enp142s0"),
        (JOB, "NCCL_FASTRAK_LLCM_DEVICE_DIRECTORY", "/dev/aperture_devices")],
    "gcp-a3-ultra": [(JOB, "NCCL_NET", "gIB"), (JOB, "NCCL_SOCKET_IFNAME", "enp0s19,enp192s20")],
    "slingshot": [
        (JOB, "NCCL_NET", "AWS Libfabric"), (JOB, "NCCL_SOCKET_IFNAME", "hsn"), (JOB, "NCCL_CROSS_NIC", "1"),
        (OPTIONAL, "NCCL_NET_GDR_LEVEL", "PHB"), (JOB, "FI_CXI_DISABLE_HOST_REGISTER", "1"),
        (JOB, "FI_MR_CACHE_MONITOR", "userfaultfd"), (JOB, "FI_CXI_DEFAULT_CQ_SIZE", "131072"),
        (JOB, "FI_CXI_RX_MATCH_MODE", "hybrid")],
    "slingshot-amd": [
        (JOB, "NCCL_SOCKET_IFNAME", "hsn0,hsn1,hsn2,hsn3"), (OPTIONAL, "NCCL_NET", "OFI"), (JOB, "NCCL_CROSS_NIC", "1"),
        (JOB, "NCCL_NET_GDR_LEVEL", "PHB"), (JOB, "FI_MR_CACHE_MONITOR", "userfaultfd"),
        (JOB, "FI_CXI_DISABLE_HOST_REGISTER", "1"), (JOB, "FI_CXI_DEFAULT_CQ_SIZE", "131072"),
        (JOB, "FI_CXI_RX_MATCH_MODE", "hybrid"), (LEAVE, "NCCL_IB_HCA", "")],
    "infiniband": [(JOB, "NCCL_SOCKET_IFNAME", FOUND), (JOB, "NCCL_IB_HCA", FOUND), (OPTIONAL, "NCCL_IB_TIMEOUT", "22")],
    "roce": [(LEAVE, "NCCL_IB_GID_INDEX", ""), (OPTIONAL, "NCCL_IB_TC", "106"), (JOB, "NCCL_IB_QPS_PER_CONNECTION", "4"),
             (JOB, "NCCL_IB_SPLIT_DATA_ON_QPS", "0")],
    "ethernet": [(JOB, "NCCL_SOCKET_IFNAME", FOUND), (JOB, "GLOO_SOCKET_IFNAME", FOUND), (OPTIONAL, "NCCL_IB_DISABLE", "1"),
                 (OPTIONAL, "NCCL_SOCKET_NTHREADS", "4"), (OPTIONAL, "NCCL_NSOCKS_PERTHREAD", "4")],
    "nvlink-node": [(LEAVE, "NCCL_P2P_DISABLE", ""), (LEAVE, "NCCL_SHM_DISABLE", ""), (LEAVE, "NCCL_NVLS_ENABLE", "")],
}
SCRIPTS = {"gcp-a3-mega": "/var/lib/tcpxo/lib64/nccl-env-profile.sh", "gcp-a3-ultra": "/usr/local/gib/scripts/set_nccl_env.sh"}
GUARDS = {"aws-efa": {"FI_EFA_USE_DEVICE_RDMA": {"ofi-nccl": "<1.7"}, "FI_PROVIDER": {"ofi-nccl": "<1.6"}}}
NOTHING = Shown("", "", (), {}, (), (), (), (), None)


def listed(profile: Profile) -> list[tuple[str, str, Any]]:
    return [(each.use, each.name, FOUND if each.finds else each.value) for each in profile.variable]


def test_every_platform_of_the_study_has_its_profile() -> None:
    assert set(profile_names()) == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_profile_says_what_the_study_says(name: str) -> None:
    profile = load_profile(name)
    assert listed(profile) == GOLDEN[name]
    assert {each.name: each.needs for each in profile.variable if each.needs} == GUARDS.get(name, {})
    assert [script.files[0] for script in profile.script] == ([SCRIPTS[name]] if name in SCRIPTS else [])


@pytest.mark.parametrize("profile", load_profiles(), ids=lambda profile: profile.name)
def test_every_variable_has_a_name_that_somebody_reads(profile: Profile) -> None:
    unread = [each.name for each in profile.variable if each.name.startswith("NCCL_") and not facts().explains(each.name)]
    assert unread == []
    assert all(len(each.reason) > 10 and len(each.source) > 5 for each in profile.variable)


def test_a_wrong_value_would_be_seen() -> None:
    assert listed(load_profile("roce")) != [*GOLDEN["roce"][:-1], (JOB, "NCCL_IB_SPLIT_DATA_ON_QPS", "1")]


# --- guards -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("plugin", "said", "left"), [
    ("1.5.0", {"FI_EFA_USE_DEVICE_RDMA": "1", "FI_PROVIDER": "efa"}, []),
    ("1.6.2", {"FI_EFA_USE_DEVICE_RDMA": "1"}, [("FI_PROVIDER", False)]),
    ("1.7.0", {}, [("FI_EFA_USE_DEVICE_RDMA", False), ("FI_PROVIDER", False)]),
    ("", {}, [("FI_EFA_USE_DEVICE_RDMA", True), ("FI_PROVIDER", True)]),
])
def test_a_guard_decides_by_the_release_and_says_when_it_cannot(plugin: str, said: dict[str, str],
                                                                left: list[tuple[str, bool]]) -> None:
    applied = apply(load_profile("aws-efa"), NOTHING, {"ofi-nccl": release(plugin)}, {})
    assert {each.name: each.value for each in applied.settings} == {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"} | said
    assert [(each.variable.name, each.unknown) for each in applied.left_out] == left
    assert all(("is unknown" in each.why) is each.unknown for each in applied.left_out)


def test_releases_that_a_platform_asks_for() -> None:
    have = {"nccl": (2, 18, 1), "driver": (535, 1), "libfabric": (1, 18), "ofi-nccl": (1, 7, 4)}
    assert apply(load_profile("aws-efa"), NOTHING, have, {}).unmet == ("nccl >=2.18.5, but the release here is 2.18.1",)
    assert apply(load_profile("aws-efa"), NOTHING, {}, {}).unmet == (), "what is not known is not held against it"


@pytest.mark.parametrize(("guard", "have", "answer"), [
    (">=2.21", (2, 21, 5), True), (">=2.21", (2, 20, 9), False), ("<1.7", (1, 7), False), ("<1.7", (1, 6, 9), True),
    (">=1.6,<1.7", (1, 6), True), (">=1.6,<1.7", (1, 7), False), ("<=1.5", (1, 5, 0), True), (">2", (2, 0, 0), False),
    (">=2.21", (), None), (">=2.21", None, None)])
def test_guards(guard: str, have: tuple[int, ...] | None, answer: bool | None) -> None:
    assert holds(guard, have) is answer


def test_what_is_found_on_the_machine() -> None:
    mixed = Shown("", "", (), {"mlx5_0": ("InfiniBand",), "mlx5_1": ("InfiniBand",), "mlx5_2": ("Ethernet",)}, (), (), (),
                  ("lo", "eth0"), "eth0")
    said = {each.name: each.value for each in apply(load_profile("infiniband"), mixed, {}, {}).settings}
    assert said == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"}
    said = {each.name: each.value for each in apply(load_profile("ethernet"), mixed, {}, {}).settings}
    assert said == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("kind", KINDS)
def test_releases_of_recorded_machines_are_read_without_loading_anything(kind: str) -> None:
    found = versions(tree(kind), lambda name: "2.27.5" if name == "nvidia-nccl-cu12" else None)
    assert found["nccl"] == (2, 27, 5) and all(found.values())


# --- files that are wrong ---------------------------------------------------------------------------------------------


def test_a_slip_of_a_name_is_answered() -> None:
    with pytest.raises(HpcMpError, match=r"profile 'azure-nvd4': is not one of .*aws-efa.*Did you mean 'azure-ndv4'\?"):
        load_profile("azure-nvd4")


@pytest.mark.parametrize(("tree", "problem"), [
    ({"variable": [{"name": "A", "value": "1", "reason": "r", "source": "s", "uses": "job"}]}, "uses"),
    ({"variable": [{"name": "A", "value": "1", "reason": "r"}]}, "source"),
    ({"variable": [{"name": "A B", "value": "1", "reason": "r", "source": "s"}]}, "name"),
    ({"variable": [{"name": "A", "value": "1\n", "reason": "r", "source": "s"}]}, "value"),
    ({"variable": [{"name": "A", "value": 1, "reason": "r", "source": "s"}]}, "value"),
    ({"variable": [{"name": "A", "value": "1", "reason": "r", "source": "s", "needs": {"nccl": "2.21"}}]}, "needs"),
    ({"variable": [{"name": "A", "value": "1", "reason": "r", "source": "s", "use": "leave"}]}, "must not have a value"),
    ({"variable": [{"name": "A", "value": value, "reason": "r", "source": "s"} for value in "12"]}, "several values"),
    ({"cloud": "Azur"}, "Azur is not one of"),
])
def test_a_wrong_profile_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Profile.model_validate({"name": "x", "title": "t"} | tree)
    good = {"name": "A", "value": "1", "reason": "r", "source": "s", "needs": {"nccl": ">=2.21,<3"}}
    assert Profile.model_validate({"name": "x", "title": "t", "cloud": "Azure", "variable": [good]})
