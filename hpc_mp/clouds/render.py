"""The files of a cluster: every template of its cloud filled in, every script as it is; and the directory that they become."""

from __future__ import annotations

import shutil
from collections.abc import Mapping
from pathlib import Path

import jinja2

from hpc_mp import __version__
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.request import ClusterRequest
from hpc_mp.clouds.summary import resource, summarise

FOLDER = "cyclecloud/other-clouds"
VERSIONS = {  # what the templates were checked with; tests/test_clouds_prove.py checks them again
    "pcluster": "3.16.1",
    "toolkit": "v1.95.0",
    "slurm_gcp": "6.12.1",
    "base_image": "ubuntu-accelerator-2404-amd64-with-nvidia-580-v20260522",
}
_CAPACITY = {"on-demand": "ONDEMAND", "spot": "SPOT", "block": "CAPACITY_BLOCK"}
_ARN = {"cn": "aws-cn", "us-gov": "aws-us-gov"}  # regions that are a partition of their own, by how their names begin


def render(request: ClusterRequest) -> dict[str, str]:
    """File name → text. The request must have been checked."""
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                               autoescape=False)
    values = _values(request)
    folder = asset(f"{FOLDER}/{request.size.cloud}")
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())}
    return {name.removesuffix(".j2"): jinja.from_string(text).render(values) if name.endswith(".j2") else text
            for name, text in texts.items() if name != "build-image.sh" or request.size.nics}


def _values(request: ClusterRequest) -> dict[str, object]:
    found = summarise(request)
    wheel = f"hpc_mp-{__version__}-py3-none-any.whl"
    options = {name.replace("-", "_"): "" for name in ("key", "reservation", "state-bucket")}
    options |= {name.replace("-", "_"): value for name, value in request.options.items()}
    region = options["region"]
    return VERSIONS | options | {
        "size": request.size, "nodes": request.nodes, "name": request.name, "partition": request.partition,
        "capacity": request.capacity, "capacity_type": _CAPACITY.get(request.capacity), "scratch_gib": request.scratch_gib,
        "placement": request.placement,
        "placement_reason": "" if request.placement else f"  # {_without_placement(request)}", "resource": resource(request),
        "head_subnet": options.get("head_subnet") or options.get("subnet"),
        "arn": next((arn for begin, arn in _ARN.items() if region.startswith(f"{begin}-")), "aws"),
        "version": __version__, "wheel": wheel, "wheel_uri": f"s3://{options.get('bucket')}/{request.name}/{wheel}",
        "quotas": found.quotas, "needs": found.needs, "busbw": found.busbw, "job": found.job,
    }


def _without_placement(request: ClusterRequest) -> str:
    if not request.size.nics:
        return "these machines have no fast network to be close on"
    if "reservation" in request.options:
        return "the reservation decides where its machines stand"
    return "a single node is close to itself"


def write(directory: Path, files: Mapping[str, str]) -> None:
    """
    Raises:
        HpcMpError: the directory exists, or cannot be made or filled; then nothing of it is left.
    """
    try:
        directory.mkdir(parents=True)
        _fill(directory, files)
    except FileExistsError:
        raise HpcMpError(f"--output {directory}", "exists", "give another directory, or move this one away") from None
    except OSError as error:
        raise HpcMpError(f"--output {directory}", f"cannot be written ({error.strerror})",
                         "give a directory that does not exist yet, in one that you may write to") from None


def _fill(directory: Path, files: Mapping[str, str]) -> None:
    try:
        for name, text in files.items():
            (directory / name).write_text(text, encoding="utf-8")
    except OSError:
        shutil.rmtree(directory, ignore_errors=True)  # half of a cluster would be in the way of the next try
        raise
