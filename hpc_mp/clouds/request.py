"""What a user asks for: a machine of a cloud, and options as a table, checked before anything is written."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.catalogue import MachineType, catalogue

CLOUDS = {"aws": "AWS", "gcp": "Google Cloud"}
TOOLS = {"aws": "AWS ParallelCluster", "gcp": "Google's Cluster Toolkit"}
_ELSEWHERE = {  # adapters whose software is part of an image that only Google's own blueprint builds
    "TCPX": "examples/machine-learning/a3-highgpu-8g",
    "TCPXO": "examples/machine-learning/a3-megagpu-8g",
}


@dataclass(frozen=True, slots=True)
class Field:
    """An option: which clouds take it, which need it, the pattern of its value in each, and what that is in words."""

    patterns: Mapping[str, str]
    words: str
    needed: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class ClusterRequest:
    """``options``: those of ``FIELDS`` that were given. ``scratch_gib``: of the parallel file system, 0: none."""

    size: MachineType
    nodes: int
    name: str
    partition: str
    capacity: str
    scratch_gib: int
    options: Mapping[str, str]

    @property
    def placement(self) -> bool:
        """Machines close together: between several nodes, where no reservation has decided already."""
        return self.nodes > 1 and bool(self.size.nics) and "reservation" not in self.options


_GOOGLE = r"[a-z]([-a-z0-9]{0,61}[a-z0-9])?"
_BUCKET = r"[a-z0-9][a-z0-9.-]{1,61}[a-z0-9]"
_SUBNET = r"subnet-([0-9a-f]{8}|[0-9a-f]{17})"
FIELDS: Mapping[str, Field] = {
    "region": Field({"aws": r"[a-z]{2}(-[a-z]+)+-\d", "gcp": r"[a-z]+-[a-z]+\d+"}, "a region, such as us-east-1 or us-central1",
                    ("aws", "gcp")),
    "subnet": Field({"aws": _SUBNET}, "the subnet of the compute nodes, subnet-… with 8 or 17 hexadecimal digits", ("aws",)),
    "head-subnet": Field({"aws": _SUBNET}, "the subnet of the head node, subnet-… with 8 or 17 hexadecimal digits"),
    "bucket": Field({"aws": _BUCKET}, "an S3 bucket of yours, for the scripts and the wheel", ("aws",)),
    "key": Field({"aws": r"[\w.@+-]{1,255}"}, "the name of an EC2 key pair"),
    "project": Field({"gcp": r"([a-z0-9.-]+:)?[a-z][-a-z0-9]{4,28}[a-z0-9]"}, "the identifier of a Google Cloud project",
                     ("gcp",)),
    "zone": Field({"gcp": r"[a-z]+-[a-z]+\d+-[a-z]"}, "a zone of the region, such as us-central1-a", ("gcp",)),
    "state-bucket": Field({"gcp": _BUCKET}, "a Cloud Storage bucket, for Terraform's state"),
    "reservation": Field({"aws": r"cr-[0-9a-f]{8,17}", "gcp": rf"(projects/[a-z0-9.:-]+/reservations/)?{_GOOGLE}(/[\w/-]+)?"},
                         "a reservation: cr-… on AWS, its name or path on Google Cloud"),
}
CAPACITIES = {"aws": ("on-demand", "spot", "block"), "gcp": ("on-demand", "spot", "flex")}
_NAMES = {"aws": r"[a-zA-Z][a-zA-Z0-9-]{0,39}", "gcp": r"[a-z][-a-z0-9]{0,19}"}  # ParallelCluster with accounting; slurm-gcp
_PARTITION = r"[a-z][a-z0-9-]{0,24}"
_SCRATCH_DEFAULT = {"aws": 4800, "gcp": 36000}
_SCRATCH = {"aws": (1200, 2400, "1200 or a multiple of 2400 (FSx for Lustre, PERSISTENT_2)"),
            "gcp": (18000, 18000, "a multiple of 18000 (Managed Lustre at 500 MB/s per TiB)")}


def usual_scratch(size: MachineType) -> int:
    """GiB; none for machines to try things out on."""
    return _SCRATCH_DEFAULT[size.cloud] if size.gpus else 0


def check(request: ClusterRequest) -> None:
    """
    Raises:
        HpcMpError: an option is missing, malformed, of another cloud, or goes with no other.
    """
    cloud = request.size.cloud
    if request.nodes < 1:
        raise HpcMpError(f"--nodes {request.nodes}", "must be at least 1", "say how many machines the cluster is to have")
    _match("--name", request.name, _NAMES[cloud], "letters, digits and hyphens, at most "
           + ("40" if cloud == "aws" else "20, in lower case"))
    _match("--partition", request.partition, _PARTITION, "lower case letters, digits and hyphens, at most 25")
    missing = {f"--{name}": field.words for name, field in FIELDS.items()
               if cloud in field.needed and name not in request.options}
    if missing:
        raise HpcMpError(", ".join(missing), f"missing, and {CLOUDS[cloud]} needs {'them' if len(missing) > 1 else 'it'}",
                         f"give {'; '.join(missing.values())}")
    for name, field in FIELDS.items():
        _check_option(name, field, cloud, request.options.get(name))
    _check_zone(request.options)
    _check_capacity(request)
    least, step, words = _SCRATCH[cloud]
    if request.scratch_gib and request.scratch_gib != least and (request.scratch_gib < least or request.scratch_gib % step):
        raise HpcMpError(f"--scratch-gib {request.scratch_gib}", f"is no size of the file system: {words}",
                         f"say --scratch-gib {max(least, request.scratch_gib // step * step)}, or 0 for none")


def _check_option(name: str, field: Field, cloud: str, value: str | None) -> None:
    if value is None:
        return
    if cloud not in field.patterns:
        raise HpcMpError(f"--{name} {value}", f"means nothing on {CLOUDS[cloud]}", "leave it out")
    _match(f"--{name}", value, field.patterns[cloud], field.words)


def _check_zone(options: Mapping[str, str]) -> None:
    if "zone" in options and not options["zone"].startswith(options["region"] + "-"):
        raise HpcMpError(f"--zone {options['zone']}", f"is not in the region {options['region']}",
                         f"give a zone whose name begins with {options['region']}-")


def _check_capacity(request: ClusterRequest) -> None:
    allowed = CAPACITIES[request.size.cloud]
    if request.capacity not in allowed:
        raise HpcMpError(f"--capacity {request.capacity}", f"does not exist on {CLOUDS[request.size.cloud]}",
                         f"say {' or '.join(allowed)}")
    if request.capacity == "block" and "reservation" not in request.options:
        raise HpcMpError("--capacity block", "a Capacity Block is a reservation with an identifier",
                         "give it with --reservation cr-…")
    if request.capacity in ("spot", "flex") and "reservation" in request.options:
        raise HpcMpError(f"--capacity {request.capacity}", "does not go with a reservation", "leave out one of the two")


def _match(option: str, value: str, pattern: str, words: str) -> None:
    if not re.fullmatch(pattern, value):
        raise HpcMpError(f"{option} {value}", "is not well formed", f"give {words}")


def find_machine(sku: str) -> MachineType:
    """By name, whatever its case.

    Raises:
        HpcMpError: there is none, it is Azure's, or no template is made for it.
    """
    size = catalogue().machine(sku)
    if size is None:
        here = [each.name for each in catalogue().of(*CLOUDS)]
        names = [each.name for each in catalogue().of("azure", *CLOUDS)]
        raise HpcMpError(f"--sku {sku}", "is not in the catalogue",
                         f"{did_you_mean(sku, names)} Here are {', '.join(here)}".lstrip())
    if size.cloud == "site":
        raise HpcMpError(f"--sku {size.name}", "is a site's own machine", "name a machine of a cloud: see env/machines")
    if size.cloud not in CLOUDS:
        raise HpcMpError(f"--sku {size.name}", "is a size of Azure, whose clusters CycleCloud makes",
                         "name a machine of AWS or Google Cloud")
    if size.rdma in _ELSEWHERE:
        raise HpcMpError(f"--sku {size.name}", f"needs an image with {size.rdma}, which Google's own blueprint builds",
                         f"use {_ELSEWHERE[size.rdma]} of cluster-toolkit, and there `hpc-mp env --profile {size.profile}`; "
                         "a3-ultragpu-8g and a4-highgpu-8g are rendered here")
    return size


def gres(machine: MachineType) -> str:
    """What the cloud's tool tells Slurm of the GPUs of a node; empty without any."""
    if not machine.gpus:
        return ""
    kind = f"{machine.gpu_title.split()[0].lower()}:" if machine.cloud == "aws" else ""  # EC2's name of the GPU
    return f"gpu:{kind}{machine.gpus}"
