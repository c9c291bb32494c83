"""Parameters of Azure CycleCloud Workspace for Slurm, release 2026.07.02, which deploys a CycleCloud server to a subscription.

Names and types are those of bicep/mainTemplate.bicep and bicep/types.bicep of github.com/Azure/cyclecloud-slurm-workspace.
Secrets are not included: ``az`` asks for adminPassword, and the key is given on the command line.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.render.options import Choices, ClusterPlan
from hpc_mp.clouds.azure.render.parameters import EXPORT, LUSTRE_OPTIONS

RELEASE = "2026.07.02"
SERVER = "Standard_D4as_v5"  # size of CycleCloud's machine
CLUSTER = "ccw"  # cluster of Azure's own template, which the workspace creates
CREDENTIALS = "azure"  # account of the workspace's server
NETWORK = "ccw-vnet/ccw-compute-subnet"  # network and subnet of a new workspace
_SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentParameters.json#"
_RESERVED = 5  # addresses of a subnet that Azure reserves
_LUSTRE_PREFIX = 23  # the smallest network with room for Azure Managed Lustre
_PREFIXES = (24, 23, 22, 21, 20)  # of the whole network; the nodes have half of it
_RELEASE_URL = r"https://github\.com/[\w.-]+/[\w.-]+/releases/(tag/)?[\w.-]+"
_SPECS = {"default": ["scheduler", "login", "htc", "hpc"], "scheduler": ["scheduler"], "execute": ["hpc", "htc"]}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The workspace. ``project``: URL of a GitHub release whose specs are added to the workspace's own cluster."""

    region: str
    resource_group: str
    project: str | None = None


def choices_within(choices: Choices, resource_group: str | None, project: str | None) -> tuple[Choices, Workspace]:
    """Fill in the choices that the workspace determines: its account and its new network.

    Raises:
        HpcMpError: a choice that the deployment needs is missing, or a choice would be ignored.
    """
    if choices.region is None:
        raise HpcMpError("--workspace", "is deployed into a region, and --region is missing",
                         "give it, such as --region westeurope")
    if choices.subnet or choices.credentials:
        raise HpcMpError("--workspace", "brings its own network and credentials", "leave --subnet and --credentials out")
    if choices.name.casefold() == CLUSTER:
        raise HpcMpError(f"--name {choices.name}", "is the cluster that the workspace itself makes", "give another name")
    if choices.storage == "external" and not choices.storage_address:
        raise HpcMpError("--storage external", "needs an address before the workspace is deployed", "give --storage-address")
    if choices.database and not choices.database_user:
        raise HpcMpError(f"--database {choices.database}", "needs a user before the workspace is deployed",
                         "give --database-user")
    if project and not re.fullmatch(_RELEASE_URL, project):
        raise HpcMpError(f"--project-url {project}", "is no release on GitHub, which is what a workspace can fetch",
                         "write https://github.com/OWNER/REPOSITORY/releases/tag/VERSION")
    group = f"{choices.name}-rg" if resource_group is None else resource_group
    if not re.fullmatch(r"[\w.()-]{0,89}[\w()-]", group):
        raise HpcMpError(f"--resource-group {group}", "is no name of a resource group",
                         "use at most 90 letters, digits and _ - . ( ), without a dot at the end")
    own = replace(choices, subnet=f"{group}/{NETWORK}", credentials=CREDENTIALS)
    return own, Workspace(choices.region, group, project)


def workspace_parameters(plan: ClusterPlan, workspace: Workspace) -> dict[str, Any]:
    """Return the document for ``az deployment sub create --parameters``.

    Raises:
        HpcMpError: Azure publishes no image for the size, and none is given.
    """
    choices = plan.choices
    if plan.image is None:
        raise HpcMpError(f"--sku {plan.size.name}", "has no image that Azure publishes, and a workspace wants one at once",
                         "give --image with the id of one of your own")
    values = {
        "location": workspace.region,
        "resourceGroup": workspace.resource_group,
        "adminUsername": "hpcadmin",
        "ccVMName": "ccw-cyclecloud-vm",
        "ccVMSize": SERVER,
        "clusterName": CLUSTER,
        "acceptMarketplaceTerms": False,
        "branch": RELEASE,
        "schedFilesystem": {"type": "nfs-new", "nfsCapacityInGb": 30},
        "sharedFilesystem": _shared(plan),
        "additionalFilesystem": _additional(plan),
        "network": {"type": "new", "addressSpace": f"10.0.0.0/{_prefix(plan)}", "bastion": False, "createNatGateway": True},
        "storagePrivateDnsZone": {"type": "new"},
        "clusterInitSpecs": _specs(workspace.project),
        "slurmSettings": {"startCluster": False, "version": "25.11.5", "healthCheckEnabled": True},
        "schedulerNode": {"sku": plan.heads.scheduler, "osImage": plan.plain},
        "loginNodes": {"sku": plan.heads.login, "osImage": plan.plain, "initialNodes": choices.login_nodes,
                       "maxNodes": max(choices.login_nodes, 4)},
        "htc": {"sku": plan.heads.htc, "osImage": plan.plain, "maxNodes": choices.htc_nodes, "useSpot": False},
        "hpc": {"sku": plan.size.name, "osImage": plan.image, "maxNodes": choices.nodes},
        "gpu": {"sku": plan.size.name, "osImage": plan.image, "maxNodes": 0},
        "databaseConfig": _database(plan),
        "tags": {},
    }
    return {"$schema": _SCHEMA, "contentVersion": "1.0.0.0",
            "parameters": {name: {"value": value} for name, value in values.items()}}


def _shared(plan: ClusterPlan) -> dict[str, Any]:
    if plan.choices.storage == "external":
        return {"type": "nfs-existing", "ipAddress": plan.choices.storage_host,
                "exportPath": plan.choices.storage_path or EXPORT}
    return {"type": "nfs-new", "nfsCapacityInGb": 1024}


def _additional(plan: ClusterPlan) -> dict[str, Any]:
    """Return the additional file system. Managed Lustre is created if none is given, in the zone of the workspace's own form."""
    if plan.choices.storage != "amlfs":
        return {"type": "disabled"}
    if plan.choices.storage_address:
        return {"type": "aml-existing", "ipAddress": plan.choices.storage_host, "mountPath": "/data",
                "mountOptions": LUSTRE_OPTIONS}
    return {"type": "aml-new", "lustreTier": "AMLFS-Durable-Premium-500", "lustreCapacityInTib": 4, "mountPath": "/data",
            "availabilityZone": ["1"]}


def _database(plan: ClusterPlan) -> dict[str, Any]:
    choices = plan.choices
    if not choices.database:
        return {"type": "disabled"}
    return {"type": "fqdn", "databaseUser": choices.database_user or "", "fqdn": choices.database}


def _prefix(plan: ClusterPlan) -> int:
    """Return the prefix of the smallest network of which half has room for all machines."""
    machines = 1 + plan.choices.login_nodes + plan.choices.htc_nodes + plan.choices.nodes
    room = [prefix for prefix in _PREFIXES if 2 ** (31 - prefix) - _RESERVED >= machines]
    return min(room[0], _LUSTRE_PREFIX) if plan.choices.storage == "amlfs" else room[0]


def _specs(project: str | None) -> list[dict[str, Any]]:
    return [{"type": "gitHubReleaseURL", "gitHubReleaseURL": project, "spec": spec, "target": target}
            for spec, target in _SPECS.items()] if project else []
