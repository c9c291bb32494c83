"""Values of slurm.conf, gres.conf and cgroup.conf that Slurm refuses, beside those that it takes. slurmctld 22.05.8, or slurmd -G
for the other files, ended with "fatal" for every row of ``REFUSED`` but the named ones, and started with ``RIGHT_VALUES``."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path

import pytest
from test_slurm_conf_files import GPUS, NODES, PARTITION, F, Z, errors, found


def node(field: str) -> str:
    key = field.partition("=")[0]
    return GPUS.replace(NODES, f"{re.sub(rf' {key}=.*?(?= |$)', '', NODES)} {field}")


def partition(field: str) -> str:
    keys = field.partition("=")[0].replace("Shared", "OverSubscribe")
    return GPUS.replace(PARTITION, re.sub(rf" {keys}=\S+", "", PARTITION.rstrip()) + f" {field}\n")


def setting(field: str) -> str:
    return f"{GPUS}{field}\n"


WRONG_VALUES = {  # slurmctld or, for gres.conf and cgroup.conf, slurmd 22.05.8 ended with "fatal"
    node: ["CPUs=sixtyfour", "CPUs=8k", "CPUs=08", "CPUs=70000", "cpus=-1", "Sockets=2.0", "CoresPerSocket=x",
           "ThreadsPerCore=8GB", "Boards=one", "CoreSpecCount=x", "RealMemory=500GB", "RealMemory=500M", "realmemory=1.5",
           "MemSpecLimit=4G", "Weight=high", "Weight=5000000000", "TmpDisk=10G", "State=UPP", "State=UP", "State=RESUME",
           "State=DOWN*", 'State=""', "Port=abc", "Port=0", "Port=70000"],
    partition: ["Default=MAYBE", "Default=on", "Default=y", "Hidden=MAYBE", "LLN=2", "ROOTONLY=maybe", "ReqResv=on",
                "ExclusiveUser=x", "DisableRootJobs=off", "MaxNodes=4G", "MinNodes=x", "GraceTime=0-1", "PriorityTier=70000",
                "PriorityTier=high", "DefMemPerCPU=4G", "MaxMemPerNode=x", "MaxCPUsPerNode=x", "SuspendTimeout=5m", "State=OPEN",
                "State=DRA", "State=UNKNOWN", "OverSubscribe=MAYBE", "Shared=FORCED", "MaxTime=60m", "MaxTime=NONE",
                "MaxTime=1:", "DefaultTime=1h", "PreemptMode=kill", "SelectTypeParameters=CR_CPU"],
    setting: ["NodeName=ALL", "nodename=all", "PrologFlags=Alloc,Containn", "PrologFlags=Alloc;Contain", "PrologFlags=None",
              "PrologFlags=NoHold,Contain", "PrologFlags=x11,nohold", 'PrologFlags="Alloc, Contain"',
              "AccountingStorageType=accounting_storage/mysql", "AccountingStorageType=mysql",
              "accountingstoragetype=accounting_storage/MySQL", "GresTypes=shard", "GresTypes=mps,nic", "GresTypes=GPU,shard",
              "KillWait=30s", "KillWait=70000", "SlurmdTimeout=5m", "JobRequeue=yes", "ResumeRate=x", "MinJobAge=5m",
              "SlurmdPort=6818-6820", "SlurmctldPort=abc", "UsePAM=on", "TrackWCKey=maybe", "PriorityFavorSmall=2",
              "DefMemPerCPU=4G", "MaxMemPerNode=1T", "PreemptMode=KILL", "EnforcePartLimits=strict", "SlurmctldDebug=loud",
              "SlurmdDebug=debug6", "AccountingStorageEnforce=none", "AccountingStorageEnforce=limits,x",
              "PropagateResourceLimits=FOO", "PropagateResourceLimits=stack", "SelectTypeParameters=CR_Foo",
              "SelectTypeParameters=NONE", "TaskPluginParam=boards", "TaskPluginParam=autobind=board", "PriorityMaxAge=week",
              "PriorityDecayHalfLife=2d", "PreemptExemptTime=5m", "FastSchedule=0", "FastSchedule=2", "SallocDefaultCommand=x",
              "AccountingStoreJobComment=yes"],
}
# Debian's 22.05 takes three NodeHostname for four nodes if their ports differ; Slurm from 24.11 on does not.
ADDRESSES = [("NodeAddr=10.0.0.[1-3]", "3 for 4"), ("NodeAddr=10.0.0.[1-5]", "5 for 4"), ("NodeAddr=a,b", "2 for 4"),
             ("BcastAddr=b[1-3]", "3 for 4"), ("BcastAddr=a,b,c,d,e", "5 for 4"), ("NodeHostname=h[1-3]", "3 for 4"),
             ("Port=[7001-7003]", "3 for 4"), ("Port=7001-7005", "5 for 4"), ("Port=7001,7002", "2 for 4")]
REFUSED: dict[str, tuple[str, str, str | None, str, int]] = {
    f"{make.__name__} {field}": (make(field), "conf-value", None, field.replace('"', ""),
                                 make(field)[:make(field).index(field)].count("\n") + 1)
    for make, fields in WRONG_VALUES.items() for field in fields}
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


RIGHT_VALUES = {  # slurmctld or slurmd 22.05.8 started with each, releases from 24.11 with EXTERNAL and the last flags
    node: ["CPUs=0x8", "CPUs=010", "CPUs=INFINITE", "cpus=+8", 'CPUs=" 8"', "RealMemory=64k", "RealMemory=500K",
           "RealMemory=unlimited", "Weight=4294967295", "TmpDisk=10k", "State=unknown", "State=CLOUD", "State=CLOUD+DRAIN",
           "State=FUTURE", "State=DRAINED", "State=FAILING", "State=Idle", "State=EXTERNAL", "NodeAddr=127.0.0.1",
           "NodeAddr=10.0.0.[1-4]", "NodeAddr=a,b,c,d", "BcastAddr=b1", "NodeHostname=h1", "NodeHostname=h[1-4]", "Port=7001",
           "Port=[7001-7004]", "Port=7001-7004", "Port=[7001-7002],7003,7004"],
    partition: ["Default=yes", "Default=UP", "Default=true", "Default=1", "Default=down", "Default=0", "default=No", "State=up",
                "State=DRAINED", "State=INACTIVE", "OverSubscribe=yes:4", "Shared=exclusive", "MaxTime=1-", "MaxTime=-1",
                "MaxTime=1-0:0:0", "MaxTime=Infinite", "MaxNodes=UNLIMITED", "PreemptMode=within", "PreemptMode=on",
                "SelectTypeParameters=CR_Core_Memory", "OverTimeLimit=abc", "SuspendTime=NONE"],
    setting: ["PrologFlags=alloc,contain", "PrologFlags=NoHold,Serial", "PrologFlags=,Alloc,", 'PrologFlags=""',
              "PrologFlags=RunInJob,ForceRequeueOnFail", "AccountingStorageType=accounting_storage/slurmdbd",
              "GresTypes=gpu,mps", "GresTypes=shard,gpu", "KillWait=INFINITE", "MaxJobCount=10k", "DefMemPerCPU=4k",
              "DefMemPerGPU=0x10k", "UsePAM=1", "SlurmctldPort=6820-6830", "SlurmdDebug=Debug5", "SlurmctldDebug=3",
              "EnforcePartLimits=ANY", "FastSchedule=1", "AccountingStorageEnforce=ASSOCIATIONS,2",
              "PropagateResourceLimits=ALL", "PropagateResourceLimits=MEMLOCK,STACK", "SelectTypeParameters=cr_core,CR_LLN",
              "TaskPluginParam=Cores,verbose", "TaskPluginParam=autobind=cores", "PriorityMaxAge=7-0",
              "PreemptMode=SUSPEND,GANG", "NodeName=all,x", "PartitionName=ALL Nodes=ALL", "PrivateData=foo",
              "LaunchParameters=foo"],
}


@pytest.mark.parametrize(("make", "field"), [(make, field) for make, fields in RIGHT_VALUES.items() for field in fields])
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
