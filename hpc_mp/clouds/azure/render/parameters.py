"""The file of parameters for ``cyclecloud import_cluster -p``. null: must be chosen in the form before the first start."""

from __future__ import annotations

from typing import Any

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.render.options import Choices, ClusterPlan

EXPORT = "/shared"  # default path exported by an NFS server
LUSTRE_OPTIONS = "noatime,user_xattr"  # as in Azure CycleCloud Workspace for Slurm


def parameters(plan: ClusterPlan) -> dict[str, Any]:
    """Return all parameters of the template that depend on the plan."""
    choices, size = plan.choices, plan.size
    accounting = {"url": choices.database, "user": choices.database_user, "password": None} if choices.accounting else {}
    return {
        "Region": choices.region,
        "SubnetId": choices.subnet,
        "Credentials": choices.credentials,
        "HPCMachineType": size.name,
        "HPCImageName": plan.image,
        "HPCInfiniBand": bool(size.rdma),
        "MaxHPCExecuteNodeCount": choices.nodes,
        "HPCMaxScalesetSize": plan.group,
        "SchedulerMachineType": plan.heads["scheduler"],
        "SchedulerImageName": plan.plain,
        "loginMachineType": plan.heads["login"],
        "LoginImageName": plan.plain,
        "NumberLoginNodes": choices.login_nodes,
        "MaxLoginNodeCount": max(choices.login_nodes, 4),
        "HTCMachineType": plan.heads["htc"],
        "HTCImageName": plan.plain,
        "MaxHTCExecuteNodeCount": choices.htc_nodes,
        "EnableNodeHealthChecks": bool(size.gpus or size.rdma),
        "HpcMpProfile": size.profile,
        "HpcMpTopology": topology(size),
        "HpcMpTorchIndex": "" if size.gpus else "https://download.pytorch.org/whl/cpu",
        "configuration_slurm_accounting_enabled": choices.accounting,
        **{f"configuration_slurm_accounting_{key}": value for key, value in accounting.items()},
        **_storage(choices),
    }


def topology(size: MachineType) -> str:
    """Return the topology that is written once nodes exist: NVLink blocks, the tree of InfiniBand switches, or off."""
    return "block" if size.nvlink_block else "tree" if size.rdma else "off"


def _storage(choices: Choices) -> dict[str, Any]:
    host, _, path = (choices.storage_address or "").partition(":")
    match choices.storage:
        case "nfs":
            return {"UseBuiltinShared": True}
        case "external":
            return {"UseBuiltinShared": False, "NFSType": "nfs", "NFSAddress": host or None,
                    "NFSSharedExportPath": path or EXPORT}
        case "amlfs":
            return {"UseBuiltinShared": True, "AdditionalNFS": True, "AdditionalNFSType": "lustre",
                    "AdditionalNFSAddress": host or None, "AdditionalNFSExportPath": path,
                    "AdditionalNFSMountPoint": "/data", "AdditionalNFSMountOptions": LUSTRE_OPTIONS}
