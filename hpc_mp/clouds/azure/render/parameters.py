"""The file of parameters for ``cyclecloud import_cluster -p``. null: must be chosen in the form before the first start."""

from __future__ import annotations

from typing import Any

from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.render.options import Choices, ClusterPlan

CPU_INDEX = "https://download.pytorch.org/whl/cpu"
EXPORT = "/shared"  # default path exported by an NFS server
LUSTRE_OPTIONS = "noatime,user_xattr"  # as in Azure CycleCloud Workspace for Slurm


def parameters(plan: ClusterPlan) -> dict[str, Any]:
    """Return all parameters of the template that depend on the plan."""
    choices, size = plan.choices, plan.size
    return {
        "Region": choices.region,
        "SubnetId": choices.subnet,
        "Credentials": choices.credentials,
        "HPCMachineType": size.name,
        "HPCImageName": plan.image,
        "HPCInfiniBand": plan.infiniband,
        "MaxHPCExecuteNodeCount": choices.nodes,
        "HPCMaxScalesetSize": plan.group,
        "SchedulerMachineType": plan.heads.scheduler,
        "SchedulerImageName": plan.plain,
        "loginMachineType": plan.heads.login,
        "LoginImageName": plan.plain,
        "NumberLoginNodes": choices.login_nodes,
        "MaxLoginNodeCount": max(choices.login_nodes, 4),
        "HTCMachineType": plan.heads.htc,
        "HTCImageName": plan.plain,
        "MaxHTCExecuteNodeCount": choices.htc_nodes,
        "EnableNodeHealthChecks": bool(size.gpus or size.rdma),
        "HpcMpProfile": size.profile,
        "HpcMpTopology": topology(size),
        "HpcMpTorchIndex": "" if size.gpus else CPU_INDEX,
        **_accounting(choices),
        **_storage(choices),
    }


def topology(size: MachineType) -> str:
    """Return the topology that is written once nodes exist: NVLink blocks, the tree of InfiniBand switches, or off."""
    return "block" if size.nvlink_block else "tree" if size.rdma else "off"


def _accounting(choices: Choices) -> dict[str, Any]:
    if not choices.accounting:
        return {"configuration_slurm_accounting_enabled": False}
    return {
        "configuration_slurm_accounting_enabled": True,
        "configuration_slurm_accounting_url": choices.database,
        "configuration_slurm_accounting_user": choices.database_user,
        "configuration_slurm_accounting_password": None,
    }


def _storage(choices: Choices) -> dict[str, Any]:
    match choices.storage:
        case "nfs":
            return {"UseBuiltinShared": True}
        case "external":
            return {"UseBuiltinShared": False, "NFSType": "nfs", "NFSAddress": choices.storage_host,
                    "NFSSharedExportPath": choices.storage_path or EXPORT}
        case "amlfs":
            return {"UseBuiltinShared": True, "AdditionalNFS": True, "AdditionalNFSType": "lustre",
                    "AdditionalNFSAddress": choices.storage_host, "AdditionalNFSExportPath": choices.storage_path,
                    "AdditionalNFSMountPoint": "/data", "AdditionalNFSMountOptions": LUSTRE_OPTIONS}
