"""Clusters whose configurations are tested, their golden files, and what was recorded of the tools that read them.

``python tests/clouds/other_clouds.py`` writes the golden files anew.
``python tests/clouds/other_clouds.py record PYTHON TOOLKIT`` records anew: PYTHON has aws-parallelcluster, TOOLKIT is a checkout
of cluster-toolkit.
"""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hpc_mp.catalogue import catalogue
from hpc_mp.clouds import ClusterRequest, check, find_machine, render
from hpc_mp.clouds.request import usual_scratch

GOLDEN = Path(__file__).parents[1] / "golden" / "clouds"
KEYS, VARIABLES = GOLDEN / "parallelcluster-keys.json", GOLDEN / "toolkit-variables.json"
PROBE = Path(__file__).with_name("parallelcluster.py")
AWS = {"region": "us-east-1", "subnet": "subnet-0123456789abcdef0", "head-subnet": "subnet-0fedcba9876543210",
       "bucket": "my-bucket"}
GCP = {"region": "us-central1", "zone": "us-central1-a", "project": "my-project"}
OPTIONS = {"aws": AWS, "gcp": GCP}
AWS_SKUS = tuple(size.name for size in catalogue().of("aws"))
GCP_SKUS = tuple(size.name for size in catalogue().of("gcp") if not size.rdma.startswith("TCPX"))  # which is refused
FORMS: dict[str, tuple[str, int, str, dict[str, str]]] = {  # name: machine, nodes, capacity, more options
    **{sku: (sku, 4, "on-demand", {}) for sku in (*AWS_SKUS, *GCP_SKUS)},
    "p5-block": ("p5.48xlarge", 2, "block", {"reservation": "cr-0123456789abcdef0", "key": "my-key"}),
    "p5-reserved": ("p5.48xlarge", 2, "on-demand", {"reservation": "cr-0123456789abcdef0"}),
    "p5-single": ("p5.48xlarge", 1, "spot", {}),
    "a3-reserved": ("a3-ultragpu-8g", 2, "on-demand", {"reservation": "my-reservation", "state-bucket": "my-state"}),
    "a4-flex": ("a4-highgpu-8g", 1, "flex", {}),
    "p6-spot": ("p6-b200.48xlarge", 2, "spot", {}),
}


RECORDED = ("p5.48xlarge", "p5-block", "c6i.xlarge", "a3-ultragpu-8g", "a4-flex", "n2-standard-4")  # as golden files


def wish(name: str) -> ClusterRequest:
    sku, nodes, capacity, more = FORMS[name]
    size = find_machine(sku)
    made = ClusterRequest(size, nodes, "train", "gpu" if size.gpus else "cpu", capacity, usual_scratch(size),
                          OPTIONS[size.cloud] | more)
    check(made)
    return made


def configuration(files: dict[str, str]) -> str:
    return files.get("cluster-config.yaml") or files["blueprint.yaml"]


def golden(name: str) -> dict[str, Path]:
    """The configuration and the steps of each form; scripts lie under cyclecloud/other-clouds as they are."""
    return {file: GOLDEN / name / file for file in render(wish(name)) if not file.endswith(".sh")}


def unknown_keys(config: Any, known: Any, where: str = "") -> Iterator[str]:
    """Keys of a ParallelCluster configuration that its schema has not; null in ``known`` is a free-form value."""
    if isinstance(config, list):
        for each in config:
            yield from unknown_keys(each, known, where)
    elif isinstance(config, dict) and known is not None:
        for key, value in config.items():
            if key not in known:
                yield f"{where}{key}"
            else:
                yield from unknown_keys(value, known[key], f"{where}{key}.")


def unknown_settings(blueprint: Any, variables: dict[str, list[str]]) -> Iterator[str]:
    """Settings of a blueprint's modules that are no variables of them, modules that there are not, and uses of nothing."""
    modules = [module for group in blueprint["deployment_groups"] for module in group["modules"]]
    names = [module["id"] for module in modules]
    for module in modules:
        if module["source"] not in variables:
            yield module["source"]
        else:
            yield from (f"{module['id']}: {key}" for key in module.get("settings", {}) if key not in variables[module["source"]])
        before = names[:names.index(module["id"])]
        yield from (f"{module['id']} uses {used}" for used in module.get("use", []) if used not in before)


def toolkit_variables(checkout: Path, modules: list[str]) -> dict[str, list[str]]:
    found = {}
    for module in modules:
        files = [*(checkout / module).glob("variables*.tf"), *(checkout / module).glob("variables*.pkr.hcl")]
        texts = "".join(file.read_text(encoding="utf-8") for file in files)
        found[module] = sorted(re.findall(r'^variable "(\w+)"', texts, re.MULTILINE))
    return found


def write_golden() -> None:
    for name in RECORDED:
        files = render(wish(name))
        for file, path in golden(name).items():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(files[file], encoding="utf-8")


def record(python: str, toolkit: str) -> None:
    KEYS.write_text(subprocess.run([python, PROBE, "keys"], check=True, capture_output=True, text=True).stdout, encoding="utf-8")
    modules = sorted(json.loads(VARIABLES.read_text(encoding="utf-8"))) if VARIABLES.exists() else []
    VARIABLES.write_text(json.dumps(toolkit_variables(Path(toolkit), modules), indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    if sys.argv[1:2] == ["record"]:
        record(*sys.argv[2:4])
    else:
        write_golden()
