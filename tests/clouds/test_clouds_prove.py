"""What ``hpc-mp cloud render`` writes, read by the tools that it is for: the recorded excerpts of them are no fiction.

The first test installs aws-parallelcluster into an environment of its own. The second needs a checkout of Google's
cluster-toolkit, whose modules are Terraform: name it in HPC_MP_CLUSTER_TOOLKIT.
The gcluster program itself cannot be had from an index.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
from other_clouds import AWS_SKUS, FORMS, KEYS, VARIABLES, configuration, render, toolkit_variables, wish

from hpc_mp.clouds.render import VERSIONS

PROBE = Path(__file__).with_name("parallelcluster.py")
SPOILT = {  # what is changed in the text, and what the package must say of it
    "MinCount: 4": ("MinCuont: 4", "Unknown field"),
    "Enabled: true  # ParallelCluster attaches": ("Enabled: perhaps  # ParallelCluster attaches", "Not a valid boolean"),
    "StorageCapacity: 4800": ("StorageCapacity: 5000", "FsxStorageCapacityValidator"),
    "- HealthCheckProgram: ": ("- Prolog: ", "CustomSlurmSettingsValidator"),
    "MaxCount: 4": ("MaxCount: 2", "ComputeResourceSizeValidator"),
    "Name: gpu": ("Name: Gpu_1", "NameValidator"),
    "subnet-0123456789abcdef0": ("subnet-1", "does not match"),
    "ubuntu2404": ("ubuntu1804x", "Os"),
    "PlacementGroup:\n          Enabled: true": ("AssignPublicIp: false", "EfaPlacementGroupValidator"),
}


@pytest.fixture(scope="module")
def parallelcluster(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Python that has the package: 184 MB, a minute."""
    home = tmp_path_factory.mktemp("parallelcluster")
    subprocess.run([sys.executable, "-m", "venv", home], check=True)
    python = home / "bin" / "python"
    done = subprocess.run([python, "-m", "pip", "install", "--quiet", f"aws-parallelcluster=={VERSIONS['pcluster']}"],
                          capture_output=True, text=True)
    if done.returncode:
        pytest.skip(f"aws-parallelcluster cannot be installed: {done.stderr.strip().splitlines()[-1]}")
    return python


def ask(python: Path, *arguments: str | Path) -> str:
    done = subprocess.run([python, PROBE, *arguments], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.prove
def test_parallelclusters_own_schema_takes_every_configuration_and_no_spoilt_one(parallelcluster: Path, tmp_path: Path) -> None:
    assert ask(parallelcluster, "keys") == KEYS.read_text(encoding="utf-8"), "record anew: tests/clouds/other_clouds.py"
    texts = {name: configuration(render(wish(name))) for name in FORMS if wish(name).size.cloud == "aws"}
    assert set(AWS_SKUS) <= set(texts)
    good = texts["p5.48xlarge"]
    assert all(good.count(old) >= 1 for old in SPOILT)
    files = []
    for number, text in enumerate([*texts.values(), *(good.replace(old, new, 1) for old, (new, _) in SPOILT.items())]):
        files.append(tmp_path / f"{number}.yaml")
        files[-1].write_text(text, encoding="utf-8")
    answers = json.loads(ask(parallelcluster, "check", *files))
    assert dict(zip(texts, answers, strict=False)) == {name: [] for name in texts}
    for (old, (_, words)), said in zip(SPOILT.items(), answers[len(texts):], strict=True):
        assert any(words in each for each in said), (old, said)


@pytest.mark.prove
def test_the_recorded_variables_are_those_of_cluster_toolkits_modules() -> None:
    checkout = os.environ.get("HPC_MP_CLUSTER_TOOLKIT")
    if not checkout:
        pytest.skip(f"HPC_MP_CLUSTER_TOOLKIT names no checkout of cluster-toolkit {VERSIONS['toolkit']}")
    recorded = json.loads(VARIABLES.read_text(encoding="utf-8"))
    assert toolkit_variables(Path(checkout), list(recorded)) == recorded
    assert all(recorded.values())
