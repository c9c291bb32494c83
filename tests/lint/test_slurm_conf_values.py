"""Values of slurm.conf, gres.conf and cgroup.conf that Slurm refuses, beside those that it takes. slurmctld 22.05.8, or slurmd -G
for the other files, ended with "fatal" for every row of ``REFUSED`` but the named ones, and started with ``RIGHT_VALUES``."""

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from tables import table
from test_slurm_conf_files import GPUS, NODES, PARTITION, F, Z, errors, found


def node(field: str) -> str:
    key = field.partition("=")[0]
    return GPUS.replace(NODES, f"{re.sub(rf' {key}=.*?(?= |$)', '', NODES)} {field}")


def partition(field: str) -> str:
    keys = field.partition("=")[0].replace("Shared", "OverSubscribe")
    return GPUS.replace(PARTITION, re.sub(rf" {keys}=\S+", "", PARTITION.rstrip()) + f" {field}\n")


def setting(field: str) -> str:
    return f"{GPUS}{field}\n"


def values(kind: str) -> list[tuple[Callable[[str], str], str]]:
    """Return the fields of a table, with what writes them into a slurm.conf."""
    rows = table(__file__, "slurm_conf_values.toml", kind)
    return [(make, field) for make in (node, partition, setting) for field in rows[make.__name__]]


# Debian's 22.05 takes three NodeHostname for four nodes if their ports differ; Slurm from 24.11 on does not.
ADDRESSES = [("NodeAddr=10.0.0.[1-3]", "3 for 4"), ("NodeAddr=10.0.0.[1-5]", "5 for 4"), ("NodeAddr=a,b", "2 for 4"),
             ("BcastAddr=b[1-3]", "3 for 4"), ("BcastAddr=a,b,c,d,e", "5 for 4"), ("NodeHostname=h[1-3]", "3 for 4"),
             ("Port=[7001-7003]", "3 for 4"), ("Port=7001-7005", "5 for 4"), ("Port=7001,7002", "2 for 4")]
REFUSED: dict[str, tuple[str, str, str | None, str, int]] = {
    f"{make.__name__} {field}": (make(field), "conf-value", None, field.replace('"', ""),
                                 make(field)[:make(field).index(field)].count("\n") + 1)
    for make, field in values("wrong")}
REFUSED |= {field: (node(field), "node-addresses", None, f"n[1-4]: {field}", 4) for field, _ in ADDRESSES}
REFUSED |= {
    "addresses by default": (GPUS.replace(NODES, f"NodeName=DEFAULT NodeAddr=a\n{NODES}"), "node-addresses", None,
                             "NodeAddr=a", 4),
    "small letters": (node("nodeaddr=a,b"), "node-addresses", None, "n[1-4]: NodeAddr=a,b", 4),
    "ports by default": (GPUS.replace(NODES, f"NodeName=DEFAULT Port=[7-9]\n{NODES}"), "node-addresses", None,
                         "n[1-4]: Port=[7-9]", 5),
    "a count in words": (GPUS, "conf-value", f"Name=gpu Count=two File={F},{Z}\n", "Count=two", 1),
    "a count with a wrong suffix": (GPUS, "conf-value", f"Name=gpu Count=2x File={F},{Z}\n", "Count=2x", 1),
    "ConstrainCores=maybe of cgroup.conf": (GPUS, "conf-value", None, "ConstrainCores=maybe", 1),
    "ConstrainDevices=on of cgroup.conf": (GPUS, "conf-value", None, "ConstrainDevices=on", 1),
    "MaxRAMPercent=90% of cgroup.conf": (GPUS, "conf-value", None, "MaxRAMPercent=90%", 1),
    "MemorySwappiness=x of cgroup.conf": (GPUS, "conf-value", None, "MemorySwappiness=x", 1),
    # slurmd 22.05.8 starts with these, and says "error: Invalid GRES data for gpu, Cores=0-127"
    "cores beyond the CPUs": (GPUS, "gres-cores", f"Name=gpu File={F},{Z} Cores=0-127\n", "cores 0-127", 1),
    "one core beyond": (GPUS, "gres-cores", f"Name=gpu File={F} Cores=0-3\nName=gpu File={Z} CPUs=4,8\n", "cores 4,8", 2),
    "threads as cores": (node("CPUs=8 Sockets=1 CoresPerSocket=4 ThreadsPerCore=2"), "gres-cores",
                         f"NodeName=n2 Name=gpu File={F},{Z} Cores=4-7\n", "cores 4-7", 1),
}


ALSO = ("defined-twice", "gres-undeclared", "cpus-contradict", "gres-records", "gres-count")  # consequences of such a value


@pytest.mark.parametrize("name", REFUSED)
def test_a_value_that_slurm_refuses_is_an_error(name: str, tmp_path: Path) -> None:
    conf, code, gres, subject, line = REFUSED[name]
    beside = {"gres_conf": gres} if gres else {"cgroup_conf": f"{subject}\n"} if "cgroup" in name else {}
    wrong = [each for each in found(tmp_path, conf, **beside) if each.severity == "error"]
    assert (code, subject, line) in errors(wrong), errors(wrong)
    assert all(each.fix for each in wrong) and {each.code for each in wrong} <= {code, *ALSO}


@pytest.mark.parametrize(("make", "field"), values("right"))
def test_a_value_that_slurm_takes_is_no_error(make: Callable[[str], str], field: str, tmp_path: Path) -> None:
    assert not {each.code for each in found(tmp_path, make(field))} & {"conf-value", "node-addresses"}


@pytest.mark.parametrize("cores", ["0-7", "0,1,2", "0-3,4-7", "7"])
def test_cores_of_a_node_are_no_error(cores: str, tmp_path: Path) -> None:
    wrong = found(tmp_path, GPUS, gres_conf=f"Name=gpu File={F},{Z} Cores={cores}\n", cgroup_conf="AllowedRAMSpace=98.5\n")
    assert errors(wrong) == []
    assert errors(found(tmp_path, node("CPUs=0x8"))) == []


@pytest.mark.parametrize("field", [field for field, _ in ADDRESSES])
def test_lengths_of_addresses_are_named(field: str, tmp_path: Path) -> None:
    (message,) = [each.message for each in found(tmp_path, node(field)) if each.code == "node-addresses"]
    assert message == f"{dict(ADDRESSES)[field]} nodes: Slurm does not start with it"


def test_host_names_are_counted_by_all_releases_from_24_11(tmp_path: Path) -> None:
    assert not errors(found(tmp_path, node("NodeHostname=h[1-3]"), (22, 5)))
    assert errors(found(tmp_path, node("NodeHostname=h[1-3]"), (24, 11)))
