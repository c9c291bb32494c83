"""Distributions beside hpc-mp: what they register is found, and what is missing is named with its remedy."""

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.plugins import GROUPS, plugin


@pytest.mark.parametrize(("group", "name"), [("commands", "lab"), ("linters", "template"), ("linters", "project")])
def test_what_is_registered_is_found(group: str, name: str) -> None:
    assert callable(plugin(group, name))


@pytest.mark.parametrize("group", GROUPS)
def test_what_is_not_installed_is_named(group: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        plugin(group, "none")
    value, distribution = GROUPS[group]
    assert refused.value.value == value.format("none") and refused.value.remedy == f"install it with: pip install {distribution}"
