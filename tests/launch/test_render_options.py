"""``slurm.extra``: which options of sbatch a job file may add, in which release."""

from __future__ import annotations

import re
import tomllib
from typing import Any

import pytest
from rendering import FORMS, GPUS, directives, form, job, text

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.slurm.options import TABLE
from hpc_mp.cluster.slurm.releases import Version, parse_version, releases
from hpc_mp.launch.facts import ClusterFacts

OPTIONS = tomllib.loads(asset(TABLE).read_text(encoding="utf-8"))


def refusal(version: Version | None = None, **extra: Any) -> HpcMpError:
    with pytest.raises(HpcMpError) as caught:
        text(job(slurm={"extra": {name.replace("_", "-"): value for name, value in extra.items()}}), known=ClusterFacts(version))
    return caught.value


@pytest.mark.parametrize("name", OPTIONS["refused"])
def test_what_the_script_settles_is_refused(name: str) -> None:
    error = refusal(**{name: "1"})
    assert error.value == f"slurm.extra.{name}"
    assert error.rule and error.remedy


def test_the_table_agrees_with_itself() -> None:
    known = OPTIONS["options"]
    assert not known.keys() & OPTIONS["refused"].keys()
    named = {*OPTIONS["component"], *OPTIONS["step"], *(name for group in OPTIONS["dropped"] for name in group["options"])}
    assert named - {"partition", "constraint"} <= known.keys() | OPTIONS["refused"].keys()


@pytest.mark.parametrize(("given_name", "meant"), [
    ("exclusiv", "exclusive"), ("cpu-per-task", "cpus-per-task"), ("partitions", "partition"), ("license", "licenses"),
    ("mail-typ", "mail-type"), ("cluster", "clusters")])
def test_unknown_options_are_answered_with_the_nearest(given_name: str, meant: str) -> None:
    assert f"did you mean '{meant}'" in refusal(**{given_name: "1"}).remedy


def test_an_option_twice_is_refused() -> None:
    assert refusal(gpus_per_node=2).rule == "is set by the script already"
    assert refusal(requeue=True).rule == "is already set by the script"


def test_an_option_that_the_script_leaves_out_may_be_added() -> None:
    slurm = {"gpu_request": "none", "extra": {"gres": "gpu:2,nvme:1", "clusters": "a,b", "licenses": "fs:1"}}
    assert {"--gres=gpu:2,nvme:1", "--clusters=a,b", "--licenses=fs:1"} <= set(directives(text(job(slurm=slurm))))
    assert "--requeue" not in directives(text(job(slurm={"extra": {"no-requeue": True}})))


def test_false_is_refused() -> None:
    assert "has no meaning for sbatch" in refusal(contiguous=False).rule


def test_whole_nodes_unless_told_otherwise() -> None:
    assert {"--exclusive", "--mem=0"} <= set(directives(text(job())))
    shared = directives(text(job(slurm={"extra": {"exclusive": False, "mem": "64G"}})))
    assert "--mem=64G" in shared and not {"--exclusive", "--mem=0"} & set(shared)
    assert "--mem=0" not in directives(text(job(slurm={"extra": {"mem-per-cpu": "4G"}})))


@pytest.mark.parametrize("names", [("hint", "threads-per-core"), ("nodelist", "nodefile"), ("requeue", "no-requeue")])
def test_options_of_which_sbatch_would_drop_one(names: tuple[str, str]) -> None:
    assert refusal(**dict.fromkeys(names, "expedite")).value == f"slurm.extra: {' and '.join(names)}"


@pytest.mark.parametrize(("names", "version", "refused"), [
    (("mem", "mem-per-cpu"), (22, 5), True),
    (("exclusive", "oversubscribe"), (23, 2), True),
    (("exclusive", "oversubscribe"), (22, 5), False),
    (("exclusive", "oversubscribe"), None, True),
    (("cpus-per-task", "cpus-per-gpu"), (23, 2), False),
    (("cpus-per-task", "cpus-per-gpu"), (23, 11), True),
])
def test_options_that_sbatch_refuses_together(names: tuple[str, str], version: Version | None, refused: bool) -> None:
    extra = dict.fromkeys(names, "1")
    if refused:
        assert refusal(version, **extra).value == f"the options --{' and --'.join(names)}"
    else:
        script = text(job(slurm={"extra": extra}), known=ClusterFacts(version))
        assert {f"--{name}=1" for name in names} <= set(directives(script))


@pytest.mark.parametrize(("option", "value", "version", "words"), [
    ("segment", 4, (23, 2), r"exists from Slurm 24\.05 on; this cluster runs 23\.02"),
    ("segment", 4, (24, 5), None),
    ("segment", 4, None, None),
    ("power", "x", (24, 5), r"exists before Slurm 24\.05; this cluster runs 24\.05"),
    ("power", "x", (23, 11), None),
    ("requeue", "expedite", (25, 5), r"exists from Slurm 25\.11 on"),
    ("requeue", "expedite", (25, 11), None),
])
def test_options_are_checked_against_the_release(option: str, value: object, version: Version | None,
                                                 words: str | None) -> None:
    if words:
        assert re.search(words, refusal(version, **{option: value}).rule)
    else:
        script = text(job(slurm={"extra": {option: value}}), known=ClusterFacts(version))
        assert directives(script).count(f"--{option}={value}") == 1
        assert ("--requeue" in directives(script)) is (option != "requeue")


@pytest.mark.parametrize(("version", "allowed"), [((22, 5), True), ((25, 11), True), ((26, 5), False), (None, False)])
def test_gpus_asked_for_twice(version: Version | None, allowed: bool) -> None:
    """22.05 takes --gres=gpu beside --gpus-per-node, 26.05 refuses it."""
    slurm = {"extra": {"gres": "gpu:8,nvme:1"}}
    if allowed:
        assert "--gres=gpu:8,nvme:1" in directives(text(job(job=GPUS, slurm=slurm), known=ClusterFacts(version)))
    else:
        assert "cannot be combined in sbatch from 26.05 on" in refusal(version, gres="gpu:8,nvme:1").rule
    assert "--gres=nvme:1" in directives(text(job(job=GPUS, slurm={"extra": {"gres": "nvme:1"}}), known=ClusterFacts(version)))


@pytest.mark.parametrize("name", FORMS)
def test_every_option_of_the_template_is_guarded(name: str) -> None:
    """Whatever the template writes cannot be written again through slurm.extra."""
    slurm = FORMS[name].get("slurm", {})
    extra = slurm.get("extra", {})
    written = {word[2:].partition("=")[0] for word in directives(form(name, (26, 5))) if word != "hetjob"} - extra.keys()
    assert {"nodes", "output", "time"} <= written
    for option in written - {"mem", "exclusive", "cpus-per-task"}:  # defaults, that slurm.extra replaces
        with pytest.raises(HpcMpError):
            form(name, (26, 5), slurm=slurm | {"extra": extra | {option: "1"}})


@pytest.mark.parametrize(("written", "version"), [("23.11", (23, 11)), ("23.11.4", (23, 11)), ("22.5", (22, 5))])
def test_versions_as_they_are_written(written: str, version: Version) -> None:
    assert parse_version(written) == version


@pytest.mark.parametrize("written", ["", "23", "slurm 23.11", "23.111", "v23.11"])
def test_versions_that_are_none(written: str) -> None:
    with pytest.raises(HpcMpError, match=r"must have the form YEAR\.MONTH"):
        parse_version(written)


def test_the_releases_are_in_order() -> None:
    assert list(releases()) == sorted(releases()) and releases()[0] == (22, 5) and releases()[-1] == (26, 5)
