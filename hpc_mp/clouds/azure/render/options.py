"""The user's choices for a cluster, the resulting plan, and its parameters. All choices are validated here."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.catalogue import MachineType
from hpc_mp.clouds.azure.offer import Image, Offer, image_fault

Storage = Literal["nfs", "external", "amlfs"]
EXPORT = "/shared"  # default path exported by an NFS server
LUSTRE_OPTIONS = "noatime,user_xattr"  # as in Azure CycleCloud Workspace for Slurm
NO_GROUP = 100  # Azure.MaxScalesetSize if no placement group limits it


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices of the user; None leaves a value open for CycleCloud's form."""

    # sku, nodes: size and number of the training machines
    sku: str
    nodes: int
    name: str = "hpc-mp"  # name of the cluster
    region: str | None = None
    subnet: str | None = None
    credentials: str | None = None
    image: str | None = None
    # storage of /shared: a disk of the scheduler, another NFS server; or that disk and Azure Managed Lustre beside it
    storage: Storage = "nfs"
    storage_address: str | None = None  # address of the NFS server or of Lustre, and after ``:`` the exported path
    accounting: bool = True
    database: str | None = None  # host name of the MySQL server for accounting; ``accounting`` false: no accounting
    database_user: str | None = None
    login_nodes: int = 1
    htc_nodes: int = 8


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Consistent choices, with their entries of the catalogue."""

    choices: Choices
    size: MachineType
    # image of the training machines; None if the user must name one first. ``entry``: its entry in the catalogue.
    image: str | None
    entry: Image | None
    heads: Mapping[str, str]  # the machines beside them; ``plain``: their image
    plain: str
    group: int  # number of machines that one placement group is configured to hold


def settle(choices: Choices, offer: Offer) -> ClusterPlan:
    """Validate the choices and return the plan. Raises HpcMpError if the size is unknown or retired, there are too many or too
    few nodes, the image does not fit the size, or a name is invalid."""
    size = find_size(choices.sku, offer)
    _check_nodes(choices, size)
    _check_names(choices)
    image = choices.image or size.image or None
    entry = offer.image(image) if image else None
    if image and entry and (fault := image_fault(entry, size)):
        raise HpcMpError(f"--image {image}", fault[1],
                         f"use {size.image}" if size.image else "use one built for arm64 with NVIDIA's drivers")
    heads = offer.heads[size.arch]
    plain = (entry.plain if entry else "") or heads["image"]
    return ClusterPlan(choices, size, image, entry, heads, plain, size.placement_group_max if size.rdma else NO_GROUP)


def sizes_on_offer(offer: Offer) -> tuple[MachineType, ...]:
    """Return all sizes that can still be started."""
    return tuple(size for size in offer.sizes.values() if not size.is_gone)


def find_size(sku: str, offer: Offer) -> MachineType:
    """Return the size by name, with or without ``Standard_``. Raises HpcMpError if the size does not exist or is retired."""
    size = offer.size(sku) or offer.size(f"Standard_{sku}")
    if size is None:
        names = [size.name for size in sizes_on_offer(offer)]
        fast = ", ".join(size.name for size in sizes_on_offer(offer) if size.gpus and size.rdma)
        hint = did_you_mean(sku, names, f"sizes for training are {fast}.", likeness=0.5, limit=3)
        raise HpcMpError(f"--sku {sku}", "is not a size of the catalogue", f"{hint} env/machines lists all of them")
    if size.is_gone:
        raise HpcMpError(f"--sku {size.name}", f"was retired on {size.retired}: no such machine can be started",
                         "choose an existing size, such as Standard_ND96isr_H100_v5")
    return size


def _check_nodes(choices: Choices, size: MachineType) -> None:
    if choices.nodes > 1 and size.twin:
        raise HpcMpError(f"--sku {size.name}", "has no InfiniBand (no r in its name), and --nodes is more than 1",
                         f"use {size.twin}, or --nodes 1")
    if size.rdma and choices.nodes > size.placement_group_max:
        raise HpcMpError(
            f"--nodes {choices.nodes}", f"one placement group holds {size.placement_group_max} of {size.name}, and machines in "
            "different placement groups share no InfiniBand",
            f"use --nodes {size.placement_group_max} or less, and create further clusters for more")
    for option, count, least, limit in (("--nodes", choices.nodes, 1, 1000), ("--login-nodes", choices.login_nodes, 0, 20),
                                        ("--htc-nodes", choices.htc_nodes, 0, 1000)):
        if not least <= count <= limit:
            raise HpcMpError(f"{option} {count}", f"must be from {least} to {limit}", f"use {option} in that range")


def _check_names(choices: Choices) -> None:
    for field, (form, rule, remedy) in asset_table("cyclecloud/choices.toml").items():
        value = getattr(choices, field)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise HpcMpError(f"--{field.replace('_', '-')} {value}", rule, remedy)
    if choices.storage == "nfs" and choices.storage_address:
        raise HpcMpError(f"--storage-address {choices.storage_address}", "--storage nfs is a disk of the scheduler",
                         "add --storage external or --storage amlfs")
    if not choices.accounting and (choices.database or choices.database_user):
        raise HpcMpError("--no-accounting", "contradicts --database and --database-user", "omit one of them")


def parameters(plan: ClusterPlan) -> dict[str, Any]:
    """Return the parameters for ``cyclecloud import_cluster -p`` that depend on the plan. None: must be chosen in the form before
    the first start."""
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
