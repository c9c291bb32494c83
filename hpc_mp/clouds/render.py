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
from hpc_mp.clouds.summary import promise, resource

FOLDER = "cyclecloud/other-clouds"
VERSIONS = {  # what the templates were checked with; tests/test_clouds_prove.py checks them again
    "pcluster": "3.16.1",
    "toolkit": "v1.95.0",
    "slurm_gcp": "6.12.1",
    "base_image": "ubuntu-accelerator-2404-amd64-with-nvidia-580-v20260522",
}
_CAPACITY = {"on-demand": "ONDEMAND", "spot": "SPOT", "block": "CAPACITY_BLOCK"}
_ARN = {"cn": "aws-cn", "us-gov": "aws-us-gov"}  # regions that are a partition of their own, by how their names begin


def render(wish: ClusterRequest) -> dict[str, str]:
    """File name → text. The wish must have been checked."""
    jinja = jinja2.Environment(undefined=jinja2.StrictUndefined, trim_blocks=True, lstrip_blocks=True, keep_trailing_newline=True,
                               autoescape=False)
    values = _values(wish)
    folder = asset(f"{FOLDER}/{wish.size.cloud}")
    texts = {file.name: file.read_text(encoding="utf-8") for file in sorted(folder.iterdir())}
    return {name.removesuffix(".j2"): jinja.from_string(text).render(values) if name.endswith(".j2") else text
            for name, text in texts.items() if name != "build-image.sh" or wish.size.nics}


def _values(wish: ClusterRequest) -> dict[str, object]:
    found = promise(wish)
    wheel = f"hpc_mp-{__version__}-py3-none-any.whl"
    options = {name.replace("-", "_"): "" for name in ("key", "reservation", "state-bucket")}
    options |= {name.replace("-", "_"): value for name, value in wish.options.items()}
    region = options["region"]
    return VERSIONS | options | {
        "size": wish.size, "nodes": wish.nodes, "name": wish.name, "partition": wish.partition, "capacity": wish.capacity,
        "capacity_type": _CAPACITY.get(wish.capacity), "scratch_gib": wish.scratch_gib, "placement": wish.placement,
        "placement_reason": "" if wish.placement else f"  # {_without_placement(wish)}", "resource": resource(wish),
        "head_subnet": options.get("head_subnet") or options.get("subnet"),
        "arn": next((arn for begin, arn in _ARN.items() if region.startswith(f"{begin}-")), "aws"),
        "version": __version__, "wheel": wheel, "wheel_uri": f"s3://{options.get('bucket')}/{wish.name}/{wheel}",
        "quotas": found.quotas, "needs": found.needs, "busbw": found.busbw, "job": found.job,
    }


def _without_placement(wish: ClusterRequest) -> str:
    if not wish.size.nics:
        return "these machines have no fast network to be close on"
    if "reservation" in wish.options:
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
