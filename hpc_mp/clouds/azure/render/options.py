"""The user's choices for a cluster and the resulting plan. All choices are validated here."""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Literal

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.catalogue import MachineType, catalogue
from hpc_mp.clouds.azure.offer import Heads, Image, Offer, image_fault

Storage = Literal["nfs", "external", "amlfs"]
MOST_NODES = 1000  # machines of a partition that CycleCloud's form allows
NO_GROUP = 100  # Azure.MaxScalesetSize if no placement group limits it


@dataclass(frozen=True, slots=True)
class Choices:
    """The choices as given; None leaves a value open for CycleCloud's form.

    Attributes:
        sku, nodes: size and number of the training machines.
        name: name of the cluster.
        storage: storage of /shared: a disk of the scheduler, another NFS server; or that disk and Azure Managed Lustre beside it.
        storage_address: address of the NFS server or of Lustre, and after ``:`` the exported path.
        database: host name of the MySQL server for accounting; ``accounting`` false: no accounting.
    """

    sku: str
    nodes: int
    name: str = "hpc-mp"
    region: str | None = None
    subnet: str | None = None
    credentials: str | None = None
    image: str | None = None
    storage: Storage = "nfs"
    storage_address: str | None = None
    accounting: bool = True
    database: str | None = None
    database_user: str | None = None
    login_nodes: int = 1
    htc_nodes: int = 8

    @property
    def storage_host(self) -> str | None:
        return self.storage_address.partition(":")[0] if self.storage_address else None

    @property
    def storage_path(self) -> str:
        """The exported path, "" if it is not given."""
        return (self.storage_address or "").partition(":")[2]


@dataclass(frozen=True, slots=True)
class ClusterPlan:
    """Consistent choices, with their entries of the catalogue.

    Attributes:
        image: image of the training machines; None if the user must name one first. ``known``: its entry in the catalogue.
        heads: the machines beside them; ``plain``: their image.
        group: number of machines that one placement group is configured to hold.
    """

    choices: Choices
    size: MachineType
    image: str | None
    known: Image | None
    heads: Heads
    plain: str
    group: int

    @property
    def infiniband(self) -> bool:
        return bool(self.size.rdma)


def settle(choices: Choices, offer: Offer) -> ClusterPlan:
    """Validate the choices and return the plan.

    Raises:
        HpcMpError: the size is unknown or retired, there are too many or too few nodes, the image does not fit the size, or a
            name is invalid.
    """
    size = find_size(choices.sku, offer)
    _check_nodes(choices, size)
    _check_names(choices)
    image = choices.image or size.image or None
    known = offer.image(image) if image else None
    if known:
        _check_image(known, size)
    heads = offer.heads[size.arch]
    plain = (known.plain if known else "") or heads.image
    return ClusterPlan(choices, size, image, known, heads, plain, size.placement_group_max if size.rdma else NO_GROUP)


def sizes_on_offer(offer: Offer) -> tuple[MachineType, ...]:
    """Return all sizes that can still be started."""
    return tuple(size for size in offer.sizes.values() if not size.is_gone)


def find_size(sku: str, offer: Offer) -> MachineType:
    """Return the size by name, with or without ``Standard_``.

    Raises:
        HpcMpError: the size does not exist or is retired.
    """
    found = offer.size(sku) or offer.size(f"Standard_{sku}")
    if found is None:
        if catalogue().machine(sku):
            raise HpcMpError(f"--sku {sku}", "is a machine of another cloud", "name a size of Azure")
        names = [size.name for size in sizes_on_offer(offer)]
        fast = ", ".join(size.name for size in sizes_on_offer(offer) if size.gpus and size.rdma)
        hint = did_you_mean(sku, names, f"for training there are {fast}.", likeness=0.5, limit=3)
        raise HpcMpError(f"--sku {sku}", "is no size in the catalogue", f"{hint} All of them are in env/machines")
    if found.is_gone:
        raise HpcMpError(f"--sku {found.name}", f"was retired on {found.retired}: no such machine can be started",
                         "choose a size that exists, such as Standard_ND96isr_H100_v5")
    return found


def _check_nodes(choices: Choices, size: MachineType) -> None:
    nodes = f"--nodes {choices.nodes}"
    if choices.nodes < 1:
        raise HpcMpError(nodes, "must be at least 1", "say how many machines the cluster may have at most")
    if choices.nodes > 1 and size.twin:
        raise HpcMpError(f"--sku {size.name}", "has no InfiniBand (no r in its name), and --nodes is more than 1",
                         f"take {size.twin}, or --nodes 1")
    if size.rdma and choices.nodes > size.placement_group_max:
        raise HpcMpError(
            nodes, f"one placement group holds {size.placement_group_max} of {size.name}, and machines in different placement "
            "groups share no InfiniBand", f"give --nodes {size.placement_group_max} or less, and make further clusters for more")
    if choices.nodes > MOST_NODES:
        raise HpcMpError(nodes, f"a partition has at most {MOST_NODES} machines", f"give --nodes {MOST_NODES} or less")
    for option, count, least, most in (("--login-nodes", choices.login_nodes, 0, 20),
                                       ("--htc-nodes", choices.htc_nodes, 0, MOST_NODES)):
        if not least <= count <= most:
            raise HpcMpError(f"{option} {count}", f"must be from {least} to {most}", f"give {option} in that range")


_NAMES = (
    ("name", r"[A-Za-z][A-Za-z0-9-]{1,30}[A-Za-z0-9]", "is no name of a cluster",
     "use 3 to 32 letters, digits and -, beginning with a letter: nodes are named after it"),
    ("region", r"[a-z][a-z0-9]+", "is no region as Azure names it",
     "write it without blanks and in lower case, such as westeurope (az account list-locations -o table)"),
    ("subnet", r"[^/\s]+/[^/\s]+/[^/\s]+|/subscriptions/\S+/subnets/[^/\s]+", "is no subnet",
     "write RESOURCEGROUP/NETWORK/SUBNET"),
    ("credentials", r"\S(.*\S)?", "is no account", "give the name that CycleCloud has for it, or leave it out"),
    ("database_user", r"\S+", "is no user", "give the name that the MySQL server knows, or leave it out"),
    ("image", r"\S+", "is no image", "give a URN such as microsoft-dsvm:ubuntu-hpc:2404:latest, or the id of an image"),
    ("storage_address", r"[A-Za-z0-9][\w.,-]*(:/\S*)?", "is no address", "write HOST, or HOST:/PATH"),
    ("database", r"[A-Za-z0-9][\w.-]*(:\d+)?", "is no host", "give the server's host name or address, without mysql://"),
)


def _check_names(choices: Choices) -> None:
    for field, form, rule, remedy in _NAMES:
        value = getattr(choices, field)
        if value is not None and not re.fullmatch(form, value, re.ASCII):
            raise HpcMpError(f"--{field.replace('_', '-')} {value}", rule, remedy)
    if choices.storage == "nfs" and choices.storage_address:
        raise HpcMpError(f"--storage-address {choices.storage_address}", "--storage nfs is a disk of the scheduler",
                         "give --storage external or --storage amlfs with it")
    if not choices.accounting and (choices.database or choices.database_user):
        raise HpcMpError("--no-accounting", "says that there is no database, and one is named",
                         "leave out one of the two")


def _check_image(image: Image, size: MachineType) -> None:
    if fault := image_fault(image, size):
        better = f"take {size.image}" if size.image else "take one built for arm64 with NVIDIA's drivers"
        raise HpcMpError(f"--image {image.name}", fault[1], better)
