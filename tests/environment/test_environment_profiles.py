"""Every profile against a table typed from section C of the study (and, where the sources say otherwise, from these)."""

import tomllib
from pathlib import Path
from typing import Any

import pytest
from machines.tree import KINDS, tree
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.environment.apply import apply
from hpc_mp.environment.detect import Shown
from hpc_mp.environment.facts import facts
from hpc_mp.environment.profiles import Profile, load_profile, load_profiles, profile_names
from hpc_mp.environment.versions import holds, release, versions

GOLDEN = tomllib.loads(Path(__file__).with_name("profiles.toml").read_text(encoding="utf-8"))
NOTHING = Shown("", "", (), {}, (), (), (), (), None)


def listed(profile: Profile) -> list[str]:
    return [f"{each.use} {each.name}={'(found)' if each.finds else each.value}" for each in profile.variable]


def test_every_platform_of_the_study_has_its_profile() -> None:
    assert set(profile_names()) == GOLDEN.keys()


@pytest.mark.parametrize("name", GOLDEN)
def test_a_profile_says_what_the_study_says(name: str) -> None:
    profile, golden = load_profile(name), GOLDEN[name]
    assert listed(profile) == golden["says"].splitlines()
    assert {each.name: each.needs for each in profile.variable if each.needs} == golden.get("guards", {})
    assert [script.files[0] for script in profile.script] == ([golden["script"]] if "script" in golden else [])


@pytest.mark.parametrize("profile", load_profiles(), ids=lambda profile: profile.name)
def test_every_variable_has_a_name_that_somebody_reads(profile: Profile) -> None:
    assert [each.name for each in profile.variable if each.name.startswith("NCCL_") and not facts().explains(each.name)] == []
    assert all(len(each.reason) > 10 and len(each.source) > 5 for each in profile.variable)


@pytest.mark.parametrize(("plugin", "said", "left"), table(__file__, "environment_profiles.toml", "guards"))
def test_a_guard_decides_by_the_release_and_says_when_it_cannot(plugin: str, said: dict[str, str],
                                                                left: list[list[object]]) -> None:
    applied = apply(load_profile("aws-efa"), NOTHING, {"ofi-nccl": release(plugin)}, {})
    assert {each.name: each.value for each in applied.settings} == {"NCCL_SOCKET_IFNAME": "^docker,lo,veth"} | said
    assert [[each.variable.name, each.unknown] for each in applied.left_out] == left
    assert all(("is unknown" in each.why) is each.unknown for each in applied.left_out)


def test_releases_that_a_platform_asks_for() -> None:
    have = {"nccl": (2, 18, 1), "driver": (535, 1), "libfabric": (1, 18), "ofi-nccl": (1, 7, 4)}
    assert apply(load_profile("aws-efa"), NOTHING, have, {}).unmet == ("nccl >=2.18.5, but the release here is 2.18.1",)
    assert apply(load_profile("aws-efa"), NOTHING, {}, {}).unmet == (), "what is not known is not held against it"


@pytest.mark.parametrize(("guard", "have", "answer"), table(__file__, "environment_profiles.toml", "decisions"))
def test_guards(guard: str, have: tuple[int, ...] | None, answer: bool | None) -> None:
    assert holds(guard, have) is answer


def test_what_is_found_on_the_machine() -> None:
    mixed = Shown("", "", (), {"mlx5_0": ("InfiniBand",), "mlx5_1": ("InfiniBand",), "mlx5_2": ("Ethernet",)}, (), (), (),
                  ("lo", "eth0"), "eth0")
    said = {each.name: each.value for each in apply(load_profile("infiniband"), mixed, {}, {}).settings}
    assert said == {"NCCL_SOCKET_IFNAME": "=eth0", "NCCL_IB_HCA": "=mlx5_0,mlx5_1"}
    said = {each.name: each.value for each in apply(load_profile("ethernet"), mixed, {}, {}).settings}
    assert said == {"NCCL_SOCKET_IFNAME": "=eth0", "GLOO_SOCKET_IFNAME": "eth0"}


@pytest.mark.parametrize("kind", KINDS)
def test_releases_of_recorded_machines_are_read_without_loading_anything(kind: str) -> None:
    found = versions(tree(kind), lambda name: "2.27.5" if name == "nvidia-nccl-cu12" else None)
    assert found["nccl"] == (2, 27, 5) and all(found.values())


def test_a_slip_of_a_name_is_answered() -> None:
    with pytest.raises(HpcMpError, match=r"profile 'azure-nvd4': is not one of .*aws-efa.*Did you mean 'azure-ndv4'\?"):
        load_profile("azure-nvd4")


@pytest.mark.parametrize(("tree", "problem"), table(__file__, "environment_profiles.toml", "wrong"))
def test_a_wrong_profile_is_refused(tree: dict[str, Any], problem: str) -> None:
    with pytest.raises(ValueError, match=problem):
        Profile.model_validate({"name": "x", "title": "t"} | tree)
    good = {"name": "A", "value": "1", "reason": "r", "source": "s", "needs": {"nccl": ">=2.21,<3"}}
    assert Profile.model_validate({"name": "x", "title": "t", "cloud": "Azure", "variable": [good]})
