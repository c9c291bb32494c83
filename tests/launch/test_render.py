"""The job script: golden files, every line explained, what is derived, forms that contradict each other, a site's own files."""

import json
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
from click.testing import CliRunner, Result
from rendering import CPU, FORMS, GOLDEN, GPUS, PYTHON, RUN, directives, executable, facts, form, golden, job, text
from tables import table

from hpc_mp.base import assets
from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli
from hpc_mp.cluster.slurm.releases import Version, differences, releases
from hpc_mp.job import resolve
from hpc_mp.job.load import under
from hpc_mp.job.values import seconds_of
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.render import ScriptTemplate, check_sweep, find_template, render, site_defaults
from hpc_mp.launch.render.values import gpu_request

# --- the text ---------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", FORMS)
def test_golden(name: str) -> None:
    for version in releases():
        kept = golden(name, version)
        assert form(name, version) == kept.read_text(encoding="utf-8"), f"{kept.name}: tests/support/rendering.py writes it anew"
    assert form(name, None) == form(name, releases()[0]), "a release that is not known gets what all of them take"


def test_no_golden_file_is_left_over() -> None:
    assert {path.name for path in GOLDEN.iterdir()} == {golden(name, version).name for name in FORMS for version in releases()}


@pytest.mark.parametrize("name", FORMS)
def test_every_line_is_explained(name: str) -> None:
    for version in (None, (22, 5), (26, 5)):
        script = render(job(**FORMS[name]), [RUN] * 3, facts(version), python=PYTHON)
        assert all(why for _, why in script.explanations)
        assert not [why for _, why in script.explanations if "{{" in why or why.startswith("'")]
        assert "\n".join(line for line, _ in script.explanations).split() == script.text.split()


def test_bash_and_shellcheck_find_nothing(tmp_path: Path) -> None:
    for name in FORMS:
        (tmp_path / name).write_text(form(name, (26, 5)))
        assert subprocess.run(["bash", "-n", tmp_path / name], text=True, capture_output=True).stderr == ""
    if shutil.which("shellcheck"):
        found = subprocess.run(["shellcheck", "--severity=warning", "--exclude=SC1090,SC1091", *tmp_path.iterdir()], text=True,
                               capture_output=True)
        assert found.stdout == ""


# What people submit day by day: GPUs asked for in either form, and what brings the ranks their Python.
ORDINARY: dict[str, dict[str, Any]] = {
    "gpus-per-node": {}, "gres": {}, "profile": {},
    "modules": {"modules": ["gcc/13", "cuda/12.8"]}, "conda": {"conda": "train"}, "venv": {"venv": "/home/ann/env"},
}
PAGE = 50  # lines


def ordinary(name: str, version: Version, **slurm: Any) -> str:
    base = FORMS.get(name, {}) if not ORDINARY[name] else {"slurm": ORDINARY[name]}
    asked = {"partition": "gpu", "account": "proj", "gpu_type": "h100"} | base.get("slurm", {}) | slurm
    return render(job(**base | {"job": GPUS, "slurm": asked}), RUN, facts(version), python=PYTHON).text


@pytest.mark.parametrize("name", ORDINARY)
def test_an_ordinary_job_is_a_page(name: str) -> None:
    assert max(len(ordinary(name, version).splitlines()) for version in releases()) <= PAGE


def test_the_page_can_be_too_long() -> None:
    """The control: what a site adds counts."""
    assert len(ordinary("modules", releases()[-1], setup=[f"export A{n}=1" for n in range(PAGE)]).splitlines()) > PAGE


# --- releases ---------------------------------------------------------------------------------------------------------


def test_options_and_words_follow_the_release() -> None:
    why = [differences(version)["cpus-per-task"] for version in ((21, 8), (22, 5), (23, 2), (23, 11), (26, 5), None)]
    assert why[1] == why[2] and why[3] == why[4] and len(set(why)) == 4
    have = ["--oom-kill-step=1" in form("cpu", version) for version in ((24, 5), (24, 11), (27, 5), None)]
    assert have == [False, True, True, False]
    assert form("gpus-per-node", (20, 11)) == form("gpus-per-node", (22, 5)), "an older one than any gets the text of the first"


def test_launch_writes_for_the_release_that_it_is_told(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("text " * 100)
    (tmp_path / "job.toml").write_text('[model]\nconfig = { model_type = "gpt2", n_layer = 2, n_embd = 8, n_head = 2 }\n'
                                       '[data]\nfiles = ["a.txt"]\nsequence_length = 8\n[train]\nsteps = 1\nglobal_batch = 1\n')
    executable(tmp_path / "hpc-mp/job.sbatch.j2", "echo {{ 'oom-kill-step' in here }} {# why #}\n")

    def launch(*options: str) -> Result:
        return CliRunner().invoke(cli, ["launch", str(tmp_path / "job.toml"), "--on", "local", *options], catch_exceptions=True)

    assert launch("--dry-run", "--slurm-version", "24.11").stdout == "echo True\n"
    assert launch("--dry-run").stdout == "", "nothing here uses it"
    assert launch("--explain", "--slurm-version=23.02").stdout.startswith(
        f"# template: {tmp_path}/hpc-mp/job.sbatch.j2\necho False\n    why\n")
    document = json.loads(launch("--dry-run", "--json").stdout)
    assert document["template"] == f"{tmp_path}/hpc-mp/job.sbatch.j2" and document["script"] == "echo False\n"
    assert isinstance(launch("--dry-run", "--slurm-version", "new").exception, HpcMpError | SystemExit)


# --- what is derived --------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(("slurm", "device", "expected"), table(__file__, "render.toml", "gpu_requests"))
def test_gpu_request(slurm: dict[str, Any], device: str, expected: str | None) -> None:
    """What the golden files do not ask for."""
    assert gpu_request(job(job={"ranks_per_node": 4, "device": device}, slurm=slurm)) == expected


@pytest.mark.parametrize(("extra", "cpus", "per_core", "request_", "threads"), table(__file__, "render.toml", "cpus"))
def test_cpus_of_a_rank(extra: dict[str, Any], cpus: int | None, per_core: int, request_: int | None,
                        threads: int | None) -> None:
    spec = job(job=CPU | {"ranks_per_node": 4}, slurm={"extra": extra})
    script = text(spec, known=ClusterFacts(cpus=cpus, threads_per_core=per_core))
    assert re.findall(r"--cpus-per-task=(\d+)", script) == ([str(request_)] * 2 if request_ else [])
    shown = re.search(r'OMP_NUM_THREADS:-(.*)}"', script)
    assert shown and shown[1] == (str(threads) if threads else "$(($(nproc) < 4 ? 1 : $(nproc) / 4))")


def test_time_limits() -> None:
    seconds = {"2": 120, "90": 5400, "1:30": 90, "30:00": 1800, "01:00:00": 3600, "2:00:00": 7200, "1-12": 129600,
               "1-12:30": 131400, "1-00:30": 88200, "1-00:00:00": 86400, "2-1:2:3": 176523, "0": None}
    assert {written: seconds_of(written) for written in seconds} == seconds


@pytest.mark.parametrize(("limit", "wanted", "expected", "warned"), table(__file__, "render.toml", "grace"))
def test_grace(limit: str, wanted: int, expected: int, warned: bool) -> None:
    """Never so long that Slurm, a minute early, warns ranks that are only starting."""
    spec = job(job=CPU | {"time_limit": limit}, slurm={"grace": wanted})
    assert spec.grace == expected
    assert (f"--signal=USR2@{expected}" in directives(text(spec))) is warned


@pytest.mark.parametrize(("slurm", "expected"), table(__file__, "render.toml", "interpreters"))
def test_the_interpreter_of_a_rank(slurm: dict[str, Any], expected: str) -> None:
    """Other than those of the golden files."""
    script = text(job(slurm=slurm))
    assert f'\n  {expected} -P -m hpc_mp train "$HPC_MP_RUN/job.toml"\n}}\n' in script
    assert f"\nexec {PYTHON} -P -m hpc_mp.supervisor " in script, "the host program runs outside of all that"


@pytest.mark.parametrize(("options", "starts", "names"), [
    ({"container-image", "container-env"}, "--container-image=x", True), ({"container-image"}, "--container-image=x", False),
    ({"nodes"}, "apptainer exec", False), (None, "apptainer exec", False)])
def test_the_runtime_of_a_container(options: set[str] | None, starts: str, names: bool) -> None:
    known = ClusterFacts(srun_options=None if options is None else frozenset(options))
    script = text(job(slurm={"container": "x"}), known=known)
    assert starts in script and ("--container-env=" in script) is names


@pytest.mark.parametrize("name", ["apptainer", "singularity"])
def test_no_gpu_is_bound_for_a_job_without(name: str) -> None:
    slurm = {"container": "/x.sif", "container_runtime": name}
    assert f"  {name} exec \\\n  --no-home" in text(job(job=CPU, slurm=slurm))
    assert f"  {name} exec \\\n  --nv \\\n" in text(job(job=GPUS, slurm=slurm))


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_no_image_has_the_last_word(device: str) -> None:
    """pyxis: a variable of the image goes before one of the job, unless it is named."""
    spec = job(job={"device": device}, slurm={"container": "x"}, environment={"set": {"GREETING": "hello"}})
    script = text(spec, known=ClusterFacts(srun_options=frozenset({"container-image", "container-env"})))
    lines = re.findall(r"^export (.+)$", script, re.MULTILINE)
    exported = {name for line in lines for name in re.findall(r"(?:^| )(\w+)=", line)}
    named = re.search(r"--container-env=(\S+)", script)
    assert named and set(named[1].split(",")) == {name for name in exported if not name.startswith("HPC_MP_")}
    assert {"GREETING", "OMP_NUM_THREADS", "TRITON_CACHE_DIR"} <= exported


def test_what_a_container_sees() -> None:
    data = {"files": ["/d/[ab]/*.txt", "/d/x/y.txt", "/scratch/runs/x.txt"], "sequence_length": 8, "tokenizer": "/tok"}
    spec = job(slurm={"container": "x", "container_mounts": ["/a:/b:ro", "/c"]}, data=data)
    script = text(spec, known=ClusterFacts(srun_options=frozenset({"container-image"})))
    own = "/d:/d,/scratch/runs:/scratch/runs,/tok:/tok"
    assert f'--container-mounts={own},/a:/b:ro,/c:/c,"$HPC_MP_LOCAL:$HPC_MP_LOCAL"' in script
    spec = job(slurm={"container": "x"}, data=data)
    assert "  --bind /d:/d \\\n  --bind /scratch/runs:/scratch/runs \\\n  --bind /tok:/tok \\\n" in text(spec)


def test_components_have_their_own_resources() -> None:
    slurm = {"account": "proj", "partition": "p", "extra": {"mem": "2G", "nice": 3}, "components": [
        {"nodes": 1}, {"nodes": 2, "partition": "q", "constraint": "c", "extra": {"mem": "1G", "gres": "gpu:a100:2"}}]}
    script = text(job(job=GPUS | {"nodes": 3, "ranks_per_node": 2}, slurm=slurm))
    first, second = (set(part.split()) for part in " ".join(directives(script)).split("hetjob"))
    assert {"--nodes=1", "--partition=p", "--mem=2G", "--nice=3", "--account=proj", "--gpus-per-node=2"} <= first
    assert second == {"--nodes=2", "--ntasks-per-node=2", "--partition=q", "--constraint=c", "--mem=1G", "--gres=gpu:a100:2",
                      "--exclusive"}
    assert "  --het-group=0,1 --ntasks-per-node=2 \\\n" in script and "--relative" not in script


# --- keys that contradict each other ----------------------------------------------------------------------------------

REFUSED = tomllib.loads(Path(__file__).with_name("render.toml").read_text(encoding="utf-8"))["refused"]


@pytest.mark.parametrize(("sections", "words"), REFUSED)
def test_sections_that_are_refused(sections: dict[str, Any], words: str) -> None:
    with pytest.raises(HpcMpError, match=words):
        text(job(**sections))


def test_switches_need_a_tree() -> None:
    spec = job(slurm={"switches": "1"})
    assert "--switches=1" in directives(text(spec, known=ClusterFacts(topology="topology/tree")))
    with pytest.raises(HpcMpError, match=r"has no effect here: Slurm's topology is topology/block\. .*segment"):
        text(spec, known=ClusterFacts(topology="topology/block"))


@pytest.mark.parametrize(("sections", "words"), [
    ({"job": CPU | {"nodes": 2}}, "job.nodes = 2 in run 3 of the sweep"),
    ({"data": {"files": ["/scratch/corpus/*.txt"], "sequence_length": 8, "stage": True}}, "data.stage = true in run 3"),
    ({"model": {"pretrained": "/models/llama", "stage": True}}, "model.stage = true in run 3"),
    ({"environment": {"set": {"A": "1"}}}, r"environment.set = .* in run 3")])
def test_runs_of_a_sweep_share_their_script(sections: dict[str, Any], words: str) -> None:
    alike = [job(job=CPU), job(job=CPU, train={"steps": 2, "global_batch": 96})]
    check_sweep(alike)
    with pytest.raises(HpcMpError, match=words):
        check_sweep([*alike, job(**{"job": CPU} | sections)])


# --- a site's own files -----------------------------------------------------------------------------------------------


def template(content: str) -> ScriptTemplate:
    return ScriptTemplate(Path("/site/job.sbatch.j2"), content)


def test_a_template_line_without_a_reason_stays_and_says_so() -> None:
    own = template("#!/bin/sh\n{% if false %}\nno\n{% endif %}\necho {{ runs[0] }} {# why {{ spec.job.nodes }} #}\n")
    script = render(job(), RUN, python=PYTHON, template=own)
    assert script.text == f"#!/bin/sh\necho {RUN}\n"
    assert script.explanations == (("#!/bin/sh", ""), (f"echo {RUN}", "why 1"))
    assert script.template == "/site/job.sbatch.j2"


@pytest.mark.parametrize("content", ["{{ nothing }}\n", "{% if %}\n"])
def test_a_broken_template_is_refused(content: str) -> None:
    with pytest.raises(HpcMpError, match=r"/site/job\.sbatch\.j2: cannot be filled in"):
        render(job(), RUN, python=PYTHON, template=template(content))


def test_the_nearest_template_is_taken(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    environ = {"HOME": str(tmp_path / "home")}
    monkeypatch.setattr(assets, "SYSTEM", tmp_path / "etc")
    assert find_template(tmp_path / "project", environ).path == asset("slurm/job.sbatch.j2")
    for nearer in ("etc", "home/.config", "config", "project"):
        executable(tmp_path / nearer / "hpc-mp/job.sbatch.j2", f"of {nearer}\n")
        named = {"XDG_CONFIG_HOME": f"{tmp_path}/config"} if nearer == "config" else {}
        assert find_template(tmp_path / "project", environ | named).text == f"of {nearer}\n"


def test_a_sites_values_stand_under_the_jobs(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(assets, "SYSTEM", tmp_path / "etc")
    assert site_defaults(tmp_path, {}) == {}
    executable(tmp_path / "etc/hpc-mp/site.toml", '[environment]\nprofile = "azure-ndv5"\n')
    assert site_defaults(tmp_path, {}) == {"environment": {"profile": "azure-ndv5"}}
    executable(tmp_path / "hpc-mp/site.toml", '[slurm]\naccount = "proj"\nqos = "low"\nextra = { nice = 1, comment = "site" }\n'
               '[environment]\nset = { A = "1" }\n')
    own = {"slurm": {"qos": "high", "extra": {"comment": "mine"}}, "train": {"steps": 1, "global_batch": 1},
           "model": {"config": {"model_type": "gpt2"}}, "data": {"files": ["a"], "sequence_length": 8}}
    spec = resolve(under(site_defaults(tmp_path, {}), own), tmp_path)
    assert (spec.slurm.account, spec.slurm.qos) == ("proj", "high")
    assert spec.slurm.extra == {"nice": 1, "comment": "mine"} and spec.environment.set == {"A": "1"}


@pytest.mark.parametrize(("content", "words"), table(__file__, "render.toml", "broken_site_files"))
def test_a_broken_site_file_is_refused(tmp_path: Path, content: str, words: str) -> None:
    executable(tmp_path / "hpc-mp/site.toml", content)
    with pytest.raises(HpcMpError, match=words):
        site_defaults(tmp_path, {})
