"""The files of a lab as text: slurm.conf and its neighbours, and the network as commands of `ip -batch`."""

from collections.abc import Mapping, Sequence
from pathlib import Path

HOST = 254
"""Last number of the machine's own address on a lab's network; the controller has 1, node n1 has 11."""


def address(number: int, host: int) -> str:
    return f"10.77.{number}.{host}"


def node_address(number: int, node: str) -> str:
    return address(number, 10 + int(node.removeprefix("n")))


def cgroup_conf(release: tuple[int, ...]) -> str:
    """Return cgroup.conf, without use of cgroups. Up to 23.11 no option disables them: slurmd looks for a mounted hierarchy
    unless a plugin is named, which is then unused."""
    return "CgroupPlugin=cgroup/v1\n" if release < (24, 5) else "CgroupPlugin=disabled\n"


def munge(directory: Path) -> dict[str, str]:
    """Return settings for a separate munge. The lifetime of a credential (120 s by default) also delays a requeued job."""
    return {"AuthType": "auth/munge", "AuthInfo": f"socket={directory}/munge/socket,cred_expire=5"}


def slurm_conf(directory: Path, number: int, nodes: Sequence[str], node: str, accounting: bool,
               overrides: Mapping[str, str]) -> str:
    """Return slurm.conf: every line was necessary on a real lab or shortens waits. ``node``: a node's resources ("CPUs=4 …");
    ``overrides`` add or replace lines."""
    settings = {
        "ClusterName": f"lab{number}",
        "SlurmctldHost": f"ctl({address(number, 1)})",
        **munge(directory),
        "SlurmUser": "root",
        "SlurmdUser": "root",
        "StateSaveLocation": f"{directory}/state",
        "SlurmdSpoolDir": f"{directory}/spool/%n",
        "SlurmctldPidFile": f"{directory}/state/slurmctld.pid",
        "SlurmdPidFile": f"{directory}/state/slurmd.%n.pid",
        "SlurmctldLogFile": f"{directory}/log/slurmctld.log",
        "SlurmdLogFile": f"{directory}/log/slurmd.%n.log",
        "ProctrackType": "proctrack/linuxproc",
        "TaskPlugin": "task/none",
        "JobAcctGatherType": "jobacct_gather/linux",
        "JobAcctGatherFrequency": "task=1",
        "SelectType": "select/cons_tres",
        "SelectTypeParameters": "CR_CPU_Memory",
        "DefMemPerCPU": "500",
        "SlurmdParameters": "config_overrides",  # more CPUs than the machine has
        "GresTypes": "gpu",
        "TopologyPlugin": "topology/tree",
        "MpiDefault": "none",
        "ReturnToService": "2",
        "SlurmdTimeout": "5",
        "MessageTimeout": "5",
        "KillWait": "5",
        "BatchStartTimeout": "5",
        "MinJobAge": "600",
        "SchedulerParameters": "bf_interval=2,sched_min_interval=100000",
        "JobCompType": "jobcomp/filetxt",
        "JobCompLoc": f"{directory}/log/jobcomp.txt",
        "AccountingStorageType": "accounting_storage/none",
    }
    if accounting:
        settings |= {
            "AccountingStorageType": "accounting_storage/slurmdbd",
            "AccountingStorageHost": address(number, 1),
            "AccountingStoragePass": f"{directory}/munge/socket",
            "AccountingStorageTRES": "gres/gpu",
        }
    lines = [f"{key}={value}" for key, value in {**settings, **overrides}.items()]
    lines += [f"NodeName={n} NodeAddr={node_address(number, n)} {node}" for n in nodes]
    lines += ["PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP"]
    return "\n".join(lines) + "\n"


def slurmdbd_conf(directory: Path, number: int) -> str:
    return (
        f"AuthType=auth/munge\nAuthInfo=socket={directory}/munge/socket\nDbdHost=ctl\nDbdAddr={address(number, 1)}\n"
        f"SlurmUser=root\nLogFile={directory}/log/slurmdbd.log\nPidFile={directory}/state/slurmdbd.pid\n"
        "StorageType=accounting_storage/mysql\nStorageLoc=slurm_acct_db\nStorageUser=root\nStorageHost=localhost\n"
    )


def topology_conf(leaves: Sequence[Sequence[str]]) -> str:
    lines = [f"SwitchName=s{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(leaves, 1)]
    return "\n".join([*lines, f"SwitchName=spine Switches=s[1-{len(leaves)}]"]) + "\n"


def hosts(number: int, nodes: Sequence[str], machine: str) -> str:
    """Return /etc/hosts of the lab. Slurm 24.11 must be able to resolve the submitting host too."""
    names = {address(number, 1): "ctl", **{node_address(number, n): n for n in nodes}, address(number, HOST): machine}
    return "127.0.0.1 localhost\n" + "".join(f"{at} {name}\n" for at, name in names.items())


def network(number: int, leaves: Sequence[Sequence[str]]) -> str:
    """Return the commands for a bridge per switch and a cable (veth pair) per node: `p-n1` at the switch, `eth0` in n1."""
    lines = [
        "link set lo up",
        "link add spine type bridge",
        "link set spine up",
        f"addr add {address(number, 1)}/24 dev spine",
        "link set uplink up master spine",
    ]
    for i, leaf in enumerate(leaves, 1):
        lines += [
            f"link add s{i} type bridge",
            f"link set s{i} up",
            f"link add up-s{i} type veth peer name dn-s{i}",
            f"link set up-s{i} up master s{i}",
            f"link set dn-s{i} up master spine",
        ]
        for node in leaf:
            lines += [
                f"netns add {node}",
                f"link add p-{node} type veth peer name eth0 netns {node}",
                f"link set p-{node} up master s{i}",
            ]
    return "\n".join(lines) + "\n"
