"""``slurm.extra``: which options of sbatch a job file may add, in which release."""

import re
import tomllib
from pathlib import Path
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


def test_unknown_options_are_answered_with_the_nearest() -> None:
    slips = {"exclusiv": "exclusive", "cpu-per-task": "cpus-per-task", "partitions": "partition", "license": "licenses",
             "mail-typ": "mail-type", "cluster": "clusters"}
    for name, meant in slips.items():
        assert f"did you mean '{meant}'" in refusal(**{name: "1"}).remedy
    assert refusal(gpus_per_node=2).rule == refusal(requeue=True).rule == "is already set by the script"
    assert "has no meaning for sbatch" in refusal(contiguous=False).rule


def test_an_option_that_the_script_leaves_out_may_be_added() -> None:
    slurm = {"gpu_request": "none", "extra": {"gres": "gpu:2,nvme:1", "clusters": "a,b", "licenses": "fs:1"}}
    assert {"--gres=gpu:2,nvme:1", "--clusters=a,b", "--licenses=fs:1"} <= set(directives(text(job(slurm=slurm))))
    assert "--requeue" not in directives(text(job(slurm={"extra": {"no-requeue": True}})))


def test_whole_nodes_unless_told_otherwise() -> None:
    assert {"--exclusive", "--mem=0"} <= set(directives(text(job())))
    shared = directives(text(job(slurm={"extra": {"exclusive": False, "mem": "64G"}})))
    assert "--mem=64G" in shared and not {"--exclusive", "--mem=0"} & set(shared)
    assert "--mem=0" not in directives(text(job(slurm={"extra": {"mem-per-cpu": "4G"}})))


@pytest.mark.parametrize(("extra", "kept"), [
    ({"exclusive": False, "mem": False}, True), ({"exclusive": False, "mem-per-cpu": "4G"}, True),
    ({"mem": False}, False), ({"exclusive": False}, False), ({}, False)])
def test_steps_of_a_program_on_shared_nodes_have_the_memory_of_the_site(extra: dict[str, Any], kept: bool) -> None:
    assert ("'MEM_PER_*'" in text(job(program={"command": ["p"]}, slurm={"extra": extra}))) is kept
    assert "'MEM_PER_*'" not in text(job(slurm={"extra": extra})), "our ranks share all memory of the job"


CASES = tomllib.loads(Path(__file__).with_name("render.toml").read_text(encoding="utf-8"))["options"]


@pytest.mark.parametrize(("extra", "version", "words"), [(*case, (), "")[:3] for case in CASES])
def test_options_are_checked_together_and_against_the_release(extra: dict[str, Any], version: list[int], words: str) -> None:
    release = (version[0], version[1]) if version else None
    if words:
        assert re.search(words, str(refusal(release, **extra)))
    else:
        given = directives(text(job(job=GPUS, slurm={"extra": extra}), known=ClusterFacts(release)))
        assert all(given.count(f"--{name}={value}") == 1 for name, value in extra.items())
        assert ("--requeue" in given) is ("requeue" not in extra)


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


def test_versions_as_they_are_written() -> None:
    assert [parse_version(written) for written in ("23.11", "23.11.4", "22.5")] == [(23, 11), (23, 11), (22, 5)]
    for written in ("", "23", "slurm 23.11", "23.111", "v23.11"):
        with pytest.raises(HpcMpError, match=r"must have the form YEAR\.MONTH"):
            parse_version(written)
    assert list(releases()) == sorted(releases()) and releases()[0] == (22, 5) and releases()[-1] == (26, 5)
