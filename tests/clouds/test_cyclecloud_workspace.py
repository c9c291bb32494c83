"""Parameters for Azure CycleCloud Workspace for Slurm: held against the names and types of its release, as they were recorded."""

import tomllib
from dataclasses import replace
from typing import Any

import pytest
from cyclecloud_rendered import GOLDEN, H100, OFFER
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.clouds.azure.render.options import Choices, settle
from hpc_mp.clouds.azure.render.workspace import RELEASE, choices_within, workspace_parameters

RECORDED = tomllib.loads((GOLDEN / "workspace.toml").read_text(encoding="utf-8"))
PLAIN = {"string": str, "int": int, "bool": bool, "object": dict, "secret": str}


def misfits(values: dict[str, Any], fields: dict[str, str], path: str = "") -> list[str]:
    """Names that there are not, are missing, or have a value of another type."""
    known = {name.rstrip("?"): (kind, name.endswith("?")) for name, kind in fields.items()}
    found = [f"{path}{name}: there is none" for name in values if name not in known]
    found += [f"{path}{name}: missing" for name, (_, optional) in known.items() if name not in values and not optional]
    return found + [line for name, value in values.items() if name in known
                    for line in misfit(value, known[name][0], path + name)]


def misfit(value: Any, kind: str, path: str) -> list[str]:
    if kind.startswith("["):
        if not isinstance(value, list):
            return [f"{path}: no list"]
        return [line for each in value for line in misfit(each, kind[1:-1], f"{path}[]")]
    if kind in PLAIN:
        fits = isinstance(value, PLAIN[kind]) and isinstance(value, bool) == (kind == "bool")
        return [] if fits else [f"{path}: no {kind}"]
    if kind in RECORDED["records"]:
        return misfits(value, RECORDED["records"][kind], f"{path}.")
    union = RECORDED["types"][kind].get(value.get("type"))
    return misfits({name: each for name, each in value.items() if name != "type"}, union, f"{path}.") if union is not None else [
        f"{path}: no {kind} of type {value.get('type')}"]


def of_workspace(choices: Choices, project: str | None = None) -> dict[str, Any]:
    own, workspace = choices_within(replace(choices, subnet=None, credentials=None), None, project)
    document = workspace_parameters(settle(own, OFFER), workspace)
    assert set(document) == {"$schema", "contentVersion", "parameters"}
    return {name: each["value"] for name, each in document["parameters"].items()}


def wrong(values: dict[str, Any]) -> list[str]:
    return misfits(values, RECORDED["parameters"])


@pytest.mark.parametrize(
    "changes", table(__file__, "cyclecloud_workspace.toml", "parameters"),
    ids=lambda changes: "-".join(str(value) for value in changes.values()) or "plain")
def test_the_workspace_takes_these_parameters(changes: dict[str, Any]) -> None:
    assert RECORDED["release"] == RELEASE
    values = of_workspace(replace(H100, **changes), "https://github.com/me/mine/releases/tag/0.1.0")
    assert wrong(values) == ["adminPassword: missing", "key: missing"], "az asks for the one, the command line gives the other"
    spoiled = values | {"hpc": values["hpc"] | {"maxNodes": "4"}, "gpus": {}, "network": {"type": "old"}}
    del spoiled["htc"]
    assert [line for line in wrong(spoiled) if "Password" not in line and "key" not in line] == [
        "gpus: there is none", "htc: missing", "network: no network of type old", "hpc.maxNodes: no int"]


def test_the_workspaces_network_has_room_for_every_machine() -> None:
    for nodes, prefix in ((2, 24), (100, 24), (113, 24), (114, 23), (241, 23), (242, 22), (1000, 21)):
        values = of_workspace(replace(H100, sku="Standard_D8ads_v5", nodes=nodes))
        assert values["network"]["addressSpace"] == f"10.0.0.0/{prefix}", nodes
        assert 2 ** (31 - prefix) - 5 >= nodes + 8 + 1 + 1
    assert of_workspace(replace(H100, storage="amlfs"))["network"]["addressSpace"] == "10.0.0.0/23"


def test_a_project_is_fetched_from_a_release_on_github_alone() -> None:
    release = "https://github.com/me/mine/releases/tag/0.1.0"
    specs = of_workspace(H100, release)["clusterInitSpecs"]
    assert {each["spec"]: each["target"] for each in specs} == {
        "default": ["scheduler", "login", "htc", "hpc"], "scheduler": ["scheduler"], "execute": ["hpc", "htc"]}
    assert {each["gitHubReleaseURL"] for each in specs} == {release}
    with pytest.raises(HpcMpError, match="is not a release on GitHub"):
        of_workspace(H100, "https://example.org/mine.tgz")


@pytest.mark.parametrize(("changes", "rule"), table(__file__, "cyclecloud_workspace.toml", "refused"))
def test_what_a_workspace_cannot_be_made_of_is_refused(changes: dict[str, Any], rule: str) -> None:
    with pytest.raises(HpcMpError, match=rule):
        own, workspace = choices_within(replace(H100, **{"subnet": None, "credentials": None, **changes}), None, None)
        workspace_parameters(settle(own, OFFER), workspace)
