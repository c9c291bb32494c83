"""The lint of variables on a machine: a table of faults, each with a twin that must not be named."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
from bare import machine
from machines.tree import tree

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.facts import facts
from hpc_mp.environment.file_rules import RULES as OF_LINES
from hpc_mp.environment.findings import ANYWHERE
from hpc_mp.environment.machine_rules import RULES as ON_MACHINE
from hpc_mp.environment.nccl_values import taken
from hpc_mp.environment.profiles import load_profile, profile_names
from hpc_mp.environment.view import View, view_of

HOME = "/home/ann"


@dataclass(frozen=True)
class Case:
    """A fault: what the process (or NCCL's file) says, on which machine; ``good`` is the same without it.

    ``kind``: of tests/machines, or ``plain``: a machine with lo and eth0.
    """

    code: str
    bad: dict[str, str]
    good: dict[str, str]
    kind: str = "plain"
    profile: str = "none"
    nccl: str | None = None
    files: tuple[str, ...] = field(default=())  # that are there
    bad_conf: str = ""
    good_conf: str = ""


def one(code: str, bad: str, good: str, **more: Any) -> Case:
    def pairs(text: str) -> dict[str, str]:
        return dict(part.split("=", 1) for part in text.split("\n") if part)

    return Case(code, pairs(bad), pairs(good), **more)


def conf(code: str, bad: str, good: str, **environ: str) -> Case:
    return Case(code, dict(environ), dict(environ), bad_conf=bad, good_conf=good)


CASES = [
    # removed, legacy, foreign, unknown
    one("HM601", "NCCL_IB_CUDA_SUPPORT=1", "NCCL_NET_GDR_LEVEL=SYS"),
    one("HM601", "NCCL_IB_GDR_LEVEL=4", "NCCL_NET_GDR_READ=1"),
    one("HM601", "NCCL_LL_THRESHOLD=0", "NCCL_P2P_LL_THRESHOLD=16384"),
    one("HM601", "NCCL_TREE_THRESHOLD=0", ""),
    one("HM601", "NCCL_SINGLE_RING_THRESHOLD=0", ""),
    one("HM601", "NCCL_CHECKS_DISABLE=1", "NCCL_CHECK_MODE=DEBUG_LOCAL"),
    one("HM602", "NCCL_MIN_NRINGS=4", "NCCL_MIN_CTAS=4"),
    one("HM602", "NCCL_MAX_NCHANNELS=8", "NCCL_MAX_CTAS=8"),
    one("HM602", "NCCL_LAUNCH_MODE=PARALLEL", ""),
    one("HM602", "NCCL_CHECK_POINTERS=1", "NCCL_CHECK_MODE=DEBUG_LOCAL"),
    one("HM603", "NCCL_TIMEOUT=1800", "NCCL_IB_TIMEOUT=22"),
    one("HM603", "NCCL_SHARP_DISABLE=1", "NCCL_COLLNET_ENABLE=0"),
    one("HM603", "NCCL_MIN_CHANNELS=4", "NCCL_MIN_CTAS=4"),
    one("HM604", "NCCL_SOCKET_IFNAMES=eth0", "NCCL_SOCKET_IFNAME=eth0"),
    one("HM604", "NCCL_IB_HCAS=mlx5_0", "NCCL_FASTRAK_CTRL_DEV=eth0"),
    one("HM604", "NCCL_WHATEVER=1", "NCCL_VERSION=2.30"),
    # values
    one("HM605", "NCCL_P2P_LEVEL=3", "NCCL_NET_GDR_LEVEL=PIX"),
    one("HM606", "NCCL_P2P_DISABLE=1", "NCCL_P2P_DISABLE=0"),
    one("HM606", "NCCL_NVLS_ENABLE=0", "NCCL_NVLS_ENABLE=2"),
    one("HM606", "NCCL_PROTO=LL128", "NCCL_PROTO=Simple\nNCCL_NET=FasTrak", kind="p5"),
    one("HM606", "NCCL_IB_DISABLE=1", "NCCL_IB_DISABLE=0"),
    # what Google's plug-ins ask for, whose guest configuration checker stops a job without it
    *(one(code, f"{wanted}\nNCCL_NET_GDR_LEVEL=PIX", f"{wanted}\n{plugin}") for code, wanted in (
        ("HM602", "NCCL_MIN_NCHANNELS=4"), ("HM606", "NCCL_ALGO=Ring,Tree"), ("HM606", "NCCL_BUFFSIZE=8388608"),
        ("HM606", "NCCL_NVLS_ENABLE=0")) for plugin in (
            "NCCL_FASTRAK_USE_SNAP=1", "NCCL_GPUDIRECTTCPX_CTRL_DEV=eth0", "NCCL_NET=gIB",
            "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE=/var/lib/tcpxo/lib64/a3plus_guest_config.textproto",
            "NCCL_SHIMNET_GUEST_CONFIG_CHECKER_CONFIG_FILE=/usr/local/gib/configs/guest_config.txtpb")),
    one("HM604", "NCCL_SHIM=1", "NCCL_SHIMNET_SHIM_LAYERS=UNUSED"),
    one("HM607", "RDMAV_FORK_SAFE=1", "RDMAV_HUGEPAGES_SAFE=1"),
    one("HM607", "FI_EFA_USE_DEVICE_RDMA=1", "FI_EFA_USE_HUGE_PAGE=0", kind="p5"),
    one("HM607", "NCCL_DEBUG=TRACE", "NCCL_DEBUG=WARN"),
    one("HM607", "CUDA_LAUNCH_BLOCKING=1", "CUDA_LAUNCH_BLOCKING=0"),
    one("HM607", "NCCL_IB_GID_INDEX=3", "NCCL_IB_GID_INDEX=-1"),
    one("HM607", "NCCL_IB_TIMEOUT=32", "NCCL_IB_TIMEOUT=31"),
    one("HM607", "NCCL_IB_HCA=hsn0", "NCCL_IB_HCA=mlx5_bond_0"),
    one("HM608", "NCCL_BLOCKING_WAIT=1", "TORCH_NCCL_BLOCKING_WAIT=1"),
    one("HM608", "TORCH_NCCL_TRACE_BUFFER_SIZE=2000", "TORCH_FR_BUFFER_SIZE=2000"),
    one("HM608", "CUDA_DEVICE_MAX_CONNECTIONS=1", "CUDA_DEVICE_MAX_CONNECTIONS=8"),
    one("HM611", "NCCL_SOCKET_IFNAME=lo", "NCCL_SOCKET_IFNAME=^lo"),
    one("HM614", "FI_PROVIDER=efa\nNCCL_NET=gIB", "FI_PROVIDER=efa", kind="p5"),
    one("HM615", "NCCL_SOCKET_NTHREADS=16\nNCCL_NSOCKS_PERTHREAD=8", "NCCL_SOCKET_NTHREADS=8\nNCCL_NSOCKS_PERTHREAD=8"),
    one("HM616", "NCCL_P2P_DISABLE=true", "NCCL_P2P_DISABLE=0x0"),
    one("HM616", "NCCL_IB_TC=0106", "NCCL_IB_TC=106"),
    one("HM617", "NCCL_DEBUG=verbose", "NCCL_DEBUG= info"),
    one("HM617", "NCCL_NET_GDR_LEVEL=phb", "NCCL_NET_GDR_LEVEL=PHB"),
    one("HM617", "NCCL_SOCKET_FAMILY=IPv4", "NCCL_SOCKET_FAMILY=AF_INET"),
    one("HM618", "NCCL_SOCKET_IFNAME==eth0,=eth1", "NCCL_SOCKET_IFNAME==eth0,eth1"),
    one("HM618", "NCCL_IB_HCA=^mlx5_0, mlx5_1", "NCCL_IB_HCA=^=mlx5_0:1,mlx5_1:1"),
    # the machine
    one("HM651", "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml", "NCCL_TOPO_FILE=/etc/topo.xml"),
    one("HM651", "FI_EFA_USE_HUGE_PAGE=0", "NCCL_TOPO_FILE=/opt/microsoft/ndv5/topo.xml", kind="ndv5"),
    one("HM651", "NCCL_NET=FasTrak", "FI_PROVIDER=efa", kind="p4d"),
    one("HM652", "NCCL_SOCKET_IFNAME=ib0", "NCCL_SOCKET_IFNAME=eth"),
    one("HM652", "NCCL_SOCKET_IFNAME==eth", "NCCL_SOCKET_IFNAME=^docker,lo,veth"),
    one("HM652", "GLOO_SOCKET_IFNAME=eth", "GLOO_SOCKET_IFNAME=eth0"),
    one("HM652", "UCX_NET_DEVICES=mlx5_9:1", "UCX_NET_DEVICES=mlx5_ib0:1,eth0", kind="ndv4"),
    one("HM653", "NCCL_IB_HCA=mlx4", "NCCL_IB_HCA=mlx5_ib", kind="ndv4"),
    one("HM653", "NCCL_IB_HCA=^", "NCCL_IB_HCA=^mlx4", kind="ndv4"),
    one("HM654", "NCCL_IB_HCA=mlx5_", "NCCL_IB_HCA=^mlx5_an0", kind="ndh200v5"),
    one("HM654", "", "NCCL_IB_HCA=mlx5_ib", kind="ndh200v5"),
    one("HM655", "NCCL_TOPO_FILE=/etc/topo.xml", "NCCL_TOPO_FILE=/etc/there.xml", files=("/etc/there.xml",)),
    one("HM655", "NCCL_CONF_FILE=/site/nccl.conf", "NCCL_CONF_FILE=/site/there.conf", files=("/site/there.conf",)),
    one("HM656", "NCCL_RAS_ENABLE=0", "NCCL_NVLS_ENABLE=2", nccl="2.23.4"),
    one("HM656", "NCCL_MIN_CTAS=4", "NCCL_MIN_NCHANNELS=4", nccl="2.16.2"),
    one("HM658", "NCCL_MNNVL_ENABLE=1", "", kind="gb200", profile="auto"),
    one("HM658", "NCCL_SHM_DISABLE=0", "NCCL_SHM_LOCALITY=2", profile="nvlink-node"),
    one("HM659", "NCCL_SOCKET_IFNAME=eth", "NCCL_SOCKET_IFNAME=^docker,lo,veth", kind="p5", profile="auto"),
    one("HM660", "NCCL_ENV_PLUGIN=site", "NCCL_ENV_PLUGIN=none"),
    # NCCL's file
    conf("HM661", "export NCCL_DEBUG=WARN", "NCCL_DEBUG=WARN"),
    conf("HM661", " NCCL_DEBUG=WARN", "# NCCL_DEBUG=WARN"),
    conf("HM661", "NCCL_DEBUG =WARN", "NCCL_DEBUG=WARN"),
    conf("HM662", 'NCCL_DEBUG="WARN"', "NCCL_DEBUG=WARN"),
    conf("HM663", "NCCL_NET=IB ", "NCCL_NET=IB"),
    conf("HM664", "NCCL_DEBUG_FILE=$HOME/nccl.log", "NCCL_DEBUG_FILE=/tmp/nccl.%h.log"),
    conf("HM665", "NCCL_NET=IB # fast", "# fast\nNCCL_NET=IB"),
    conf("HM666", f"NCCL_IB_HCA={'mlx5_0,' * 200}", "NCCL_IB_HCA=mlx5_0"),
    conf("HM667", "LD_LIBRARY_PATH=/x", "NCCL_NET=IB"),
    conf("HM668", "NCCL_NET=IB\nNCCL_NET=Socket", "NCCL_NET=IB\nNCCL_DEBUG=WARN"),
    conf("HM669", "NCCL_NET=IB", "NCCL_DEBUG=WARN", NCCL_NET=""),
    conf("HM670", "NCCL_DEBUG WARN", "\n# NCCL_DEBUG WARN\nNCCL_DEBUG=WARN"),
]


PLAIN = {"sys/class/net/lo/type": "772\n", "sys/class/net/eth0/type": "1\n",
         "proc/net/route": "Iface\tDestination\neth0\t00000000\t0101A8C0\n"}


def beside(folder: Path, other: NodeSource) -> NodeSource:
    """The same machine, with room for files of its own in ``/etc``."""
    for path in ("sys", "proc"):
        (folder / path).symlink_to(other.root / path)
    return NodeSource(folder, other.ask)


def seen(case: Case, folder: Path, environ: dict[str, str], text: str) -> View:
    own = machine(folder, dict.fromkeys(case.files, "") | {"/etc/nccl.conf": text} | (PLAIN if case.kind == "plain" else {}))
    return view_of(own if case.kind == "plain" else beside(folder, tree(case.kind)), {"HOME": HOME} | environ, case.profile,
                lambda name: case.nccl if name == "nvidia-nccl-cu12" else None)


@pytest.mark.parametrize("case", CASES, ids=[f"{case.code}-{at}" for at, case in enumerate(CASES)])
def test_a_fault_is_named_and_its_twin_is_not(case: Case, tmp_path: Path) -> None:
    for name, environ, text, wanted in (("bad", case.bad, case.bad_conf, True), ("good", case.good, case.good_conf, False)):
        (tmp_path / name).mkdir()
        found = seen(case, tmp_path / name, environ, text).findings
        assert (case.code in {each.code for each in found}) is wanted, found
        if not wanted:
            assert [each for each in found if each.severity == "error"] == []


def test_there_are_enough_cases_and_every_rule_has_one() -> None:
    assert len(CASES) >= 40
    codes = [rule.code for rule in (*ANYWHERE, *ON_MACHINE, *OF_LINES)]
    assert len(codes) == len(set(codes))
    # HM657, releases that a platform asks for, has a test of its own
    assert {case.code for case in CASES} | {"HM657"} == {*codes}


def test_every_finding_says_where_what_and_what_to_do(tmp_path: Path) -> None:
    for at, case in enumerate(CASES):
        (tmp_path / str(at)).mkdir()
        for finding in seen(case, tmp_path / str(at), case.bad, case.bad_conf).findings:
            assert "{" not in finding.message and finding.message[-1] in ".?" and finding.fix
            assert finding.subject or finding.file or finding.code == "HM657"


def test_a_release_that_is_too_old_for_the_platform(tmp_path: Path) -> None:
    def codes(nccl: str) -> set[str]:
        view = view_of(tree("p5"), {}, "auto", lambda name: nccl if name == "nvidia-nccl-cu12" else None)
        return {each.code for each in view.findings}

    assert "HM657" in codes("2.17.1") and "HM657" not in codes("2.18.5")


@pytest.mark.parametrize(("release", "too_new"), [("2.29.6", True), ("2.29.7", False), ("2.30", False)])
def test_a_name_counts_from_its_release_on(release: str, too_new: bool, tmp_path: Path) -> None:
    case = one("HM656", "", "", nccl=release)
    found = seen(case, tmp_path, {"NCCL_CHECK_MODE": "DEBUG_LOCAL"}, "").findings
    assert ("HM656" in {each.code for each in found}) is too_new


@pytest.mark.parametrize("kind", ["ndv4", "ndv5", "ndh200v5", "gb200", "p4d", "p5"])
def test_a_healthy_machine_with_its_profile_has_nothing_to_complain_of(kind: str) -> None:
    """But for files of the image, which these trees do not hold."""
    view = view_of(tree(kind), {"HOME": HOME}, "auto", lambda name: "2.27.5" if name == "nvidia-nccl-cu12" else None)
    assert {each.code for each in view.findings if each.severity != "info"} <= {"HM655"}, view.findings


def test_a_finding_names_the_line_of_the_file(tmp_path: Path) -> None:
    view = seen(conf("", "", ""), tmp_path, {}, "# site\nNCCL_TIMEOUT=3\n")
    assert [(each.file, each.line) for each in view.findings] == [("/etc/nccl.conf", 2)]
    words = "NCCL_TIMEOUT is not a variable of NCCL and has no effect."
    assert view.findings[0] == Finding("HM603", "warning", "NCCL_TIMEOUT", words, view.findings[0].fix, "/etc/nccl.conf", 2)


@pytest.mark.parametrize("name", profile_names())
def test_no_profile_is_at_odds_with_the_tables(name: str) -> None:
    """What a profile says is not one of removed, foreign, harmful: a table and a profile that disagree cannot both be right."""
    known = facts()
    for each in load_profile(name).variable:
        assert each.use == "leave" or each.name not in {*known.removed, *known.foreign, *known.legacy}


@pytest.mark.parametrize(("pattern", "names"), [
    ("", ["lo", "eth0", "eth1", "eth10"]), ("eth", ["eth0", "eth1", "eth10"]), ("eth1", ["eth1", "eth10"]), ("=eth1", ["eth1"]),
    ("^eth", ["lo"]), ("^=eth1,lo", ["eth0", "eth10"]), ("eth0:1,lo", ["lo", "eth0"]), ("^", []),
    ("=", ["lo", "eth0", "eth1", "eth10"]), ("=eth0,=eth1", ["eth0"])])
def test_lists_take_what_nccl_takes(pattern: str, names: list[str]) -> None:
    assert taken(pattern, ["lo", "eth0", "eth1", "eth10"]) == names
