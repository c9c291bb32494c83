"""Parameters of Azure CycleCloud Workspace for Slurm, release 2026.07.02, which deploys a CycleCloud server to a subscription.

Names and types are those of bicep/mainTemplate.bicep and bicep/types.bicep of github.com/Azure/cyclecloud-slurm-workspace.
Secrets are not included: ``az`` asks for adminPassword, and the key is given on the command line.
"""

import re
from dataclasses import dataclass, replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.render.options import EXPORT, LUSTRE_OPTIONS, Choices, ClusterPlan

RELEASE = "2026.07.02"
SERVER = "Standard_D4as_v5"  # size of CycleCloud's machine
CLUSTER = "ccw"  # cluster of Azure's own template, which the workspace creates
NETWORK = "ccw-vnet/ccw-compute-subnet"  # network and subnet of a new workspace
_SCHEMA = "https://schema.management.azure.com/schemas/2019-04-01/deploymentParameters.json#"
_SPECS = {"default": ["scheduler", "login", "htc", "hpc"], "scheduler": ["scheduler"], "execute": ["hpc", "htc"]}


@dataclass(frozen=True, slots=True)
class Workspace:
    """The workspace. ``project``: URL of a GitHub release whose specs are added to the workspace's own cluster."""

    region: str
    resource_group: str
    project: str | None = None


def choices_within(choices: Choices, resource_group: str | None, project: str | None) -> tuple[Choices, Workspace]:
    """Fill in the choices that the workspace determines: its account and its new network. Raises HpcMpError if a choice that the
    deployment needs is missing, or a choice would be ignored."""
    region, group = choices.region or "", f"{choices.name}-rg" if resource_group is None else resource_group
    for wrong, value, rule, remedy in (
        (not region, "--workspace", "is deployed into a region, and --region is missing", "add it, such as --region westeurope"),
        (choices.subnet or choices.credentials, "--workspace", "creates its own network and credentials",
         "omit --subnet and --credentials"),
        (choices.name.casefold() == CLUSTER, f"--name {choices.name}", "is the cluster that the workspace itself creates",
         "use another name"),
        (choices.storage == "external" and not choices.storage_address, "--storage external",
         "needs an address before the workspace is deployed", "add --storage-address"),
        (choices.database and not choices.database_user, f"--database {choices.database}",
         "needs a user before the workspace is deployed", "add --database-user"),
        (project and not re.fullmatch(r"https://github\.com/[\w.-]+/[\w.-]+/releases/(tag/)?[\w.-]+", project),
         f"--project-url {project}", "is not a release on GitHub, and a workspace fetches nothing else",
         "write https://github.com/OWNER/REPOSITORY/releases/tag/VERSION"),
        (not re.fullmatch(r"[\w.()-]{0,89}[\w()-]", group), f"--resource-group {group}", "is not a name of a resource group",
         "use at most 90 letters, digits and _ - . ( ), without a dot at the end"),
    ):
        if wrong:
            raise HpcMpError(value, rule, remedy)
    return replace(choices, subnet=f"{group}/{NETWORK}", credentials="azure"), Workspace(region, group, project)


def workspace_parameters(plan: ClusterPlan, workspace: Workspace) -> dict[str, Any]:
    """Return the document for ``az deployment sub create --parameters``. Raises HpcMpError if Azure publishes no image for the
    size, and the user chose none."""
    choices, heads, plain = plan.choices, plan.heads, plan.plain
    host, _, path = (choices.storage_address or "").partition(":")
    if plan.image is None:
        raise HpcMpError(f"--sku {plan.size.name}", "has no image that Azure publishes, and a workspace needs one",
                         "add --image with the id of your own")
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
        "sharedFilesystem": {"type": "nfs-new", "nfsCapacityInGb": 1024} if choices.storage != "external" else {
            "type": "nfs-existing", "ipAddress": host, "exportPath": path or EXPORT},
        "additionalFilesystem": _additional(choices),
        "network": {"type": "new", "addressSpace": f"10.0.0.0/{_prefix(choices)}", "bastion": False, "createNatGateway": True},
        "storagePrivateDnsZone": {"type": "new"},
        "clusterInitSpecs": [{"type": "gitHubReleaseURL", "gitHubReleaseURL": workspace.project, "spec": spec, "target": target}
                             for spec, target in _SPECS.items() if workspace.project],
        "slurmSettings": {"startCluster": False, "version": "25.11.5", "healthCheckEnabled": True},
        "schedulerNode": {"sku": heads["scheduler"], "osImage": plain},
        "loginNodes": {"sku": heads["login"], "osImage": plain, "initialNodes": choices.login_nodes,
                       "maxNodes": max(choices.login_nodes, 4)},
        "htc": {"sku": heads["htc"], "osImage": plain, "maxNodes": choices.htc_nodes, "useSpot": False},
        "hpc": {"sku": plan.size.name, "osImage": plan.image, "maxNodes": choices.nodes},
        "gpu": {"sku": plan.size.name, "osImage": plan.image, "maxNodes": 0},
        "databaseConfig": {"type": "fqdn", "databaseUser": choices.database_user or "", "fqdn": choices.database}
        if choices.database else {"type": "disabled"},
        "tags": {},
    }
    return {"$schema": _SCHEMA, "contentVersion": "1.0.0.0",
            "parameters": {name: {"value": value} for name, value in values.items()}}


def _additional(choices: Choices) -> dict[str, Any]:
    """Return the additional file system. Managed Lustre without an address is created, in the zone of the workspace's form."""
    if choices.storage != "amlfs":
        return {"type": "disabled"}
    if choices.storage_address:
        return {"type": "aml-existing", "ipAddress": choices.storage_address.partition(":")[0], "mountPath": "/data",
                "mountOptions": LUSTRE_OPTIONS}
    return {"type": "aml-new", "lustreTier": "AMLFS-Durable-Premium-500", "lustreCapacityInTib": 4, "mountPath": "/data",
            "availabilityZone": ["1"]}


def _prefix(choices: Choices) -> int:
    """Return the prefix of the smallest network whose half has room for all machines and 5 addresses that Azure reserves."""
    machines = 1 + choices.login_nodes + choices.htc_nodes + choices.nodes
    smallest = 23 if choices.storage == "amlfs" else 24  # Managed Lustre needs 23
    return next(prefix for prefix in range(smallest, 0, -1) if 2 ** (31 - prefix) - 5 >= machines)
