"""A whole cluster from the cluster-init specs: fresh machines of two distributions, hpc-mp by pip, a real training.

What it stands on and what stands in for Azure: docs/admin/cluster-init.md.
"""

import json
import os
import resource
import shutil
import subprocess
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

import pytest
from cyclecloud_lab import converge as jetpack
from cyclecloud_lab import slurm
from cyclecloud_lab.converge import words
from cyclecloud_lab.site import Machine, Site, infiniband, no_infiniband
from cyclecloud_lab.site import why_not as why_no_machines
from cyclecloud_lab.system import BOOKWORM, NOBLE, TORCH, System, wheels
from cyclecloud_lab.system import why_not as why_no_system
from cyclecloud_lab.trees import differences, tree
from slurm_lab.lab import wait_until
from tables import table

ROOT = Path(__file__).resolve().parents[2]
PARTITIONS = {"hpc": ["hpc-1", "hpc-2", "hpc-3"], "htc": ["htc-1"]}
NODES = [node for nodes in PARTITIONS.values() for node in nodes]
ORDER = {"scheduler": ("default", "scheduler"), **dict.fromkeys(NODES, ("default", "execute"))}
SETTINGS = {"hpc_mp.requirement": f"hpc-mp==0.1.0 {TORCH}", "hpc_mp.profile": "ethernet", "hpc_mp.topology": "tree",
            "hpc_mp.partition": "hpc", "hpc_mp.patience": "60"}  # fmt: skip
OFFLINE = {"PIP_NO_INDEX": "1", "PIP_FIND_LINKS": "/wheels"}
HOME = "/shared/home"
REASON = why_no_machines()
pytestmark = [pytest.mark.prove, pytest.mark.skipif(REASON is not None, reason=str(REASON)), pytest.mark.timeout(3000)]

JOB = table(__file__, "cyclecloud_cluster.toml", "job")
TREE = table(__file__, "cyclecloud_cluster.toml", "tree")
BLOCKS = table(__file__, "cyclecloud_cluster.toml", "blocks")


@dataclass(frozen=True)
class Cluster:
    site: Site
    specs: Path

    @property
    def scheduler(self) -> Machine:
        return self.site["scheduler"]

    def converge(self, name: str) -> str:
        """Run a machine's scripts; what they said."""
        return words(jetpack.converge(self.site[name], ORDER[name], OFFLINE, timeout=1500))

    def begin(self, name: str) -> str:
        """A machine that has nothing yet: specs, scripts, services."""
        jetpack.prepare(self.site[name], self.specs, ORDER[name], SETTINGS)
        said = self.converge(name)
        slurm.start(self.site[name])
        return said

    def idle(self) -> None:
        """Without jobs: a slurmctld that was killed takes up an srun again that had ended since it last saved its state."""
        self.scheduler.ask("scancel", "--user=root")
        for name in NODES:
            slurm.settled(self.scheduler, name, ["IDLE"])

    def job(self, number: str) -> dict[str, str]:
        shown = self.scheduler.ask("scontrol", "-o", "show", "job", number)
        return dict(word.partition("=")[::2] for word in shown.split())


@pytest.fixture(scope="module", params=[BOOKWORM, NOBLE], ids=lambda system: system.release)
def cluster(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Cluster]:
    made_of: System = request.param
    if reason := why_no_system(made_of):
        pytest.skip(reason)
    place = tmp_path_factory.mktemp("cluster")
    specs, found = place / "specs", place / "wheels"
    shutil.copytree(ROOT / "cyclecloud/specs", specs)
    try:
        system = made_of.built()
        own = wheels(ROOT, made_of, found)
    except subprocess.CalledProcessError as error:
        pytest.skip(f"machines of a CycleCloud cluster need a mirror of {made_of.release} and PyPI: {error}")
    shutil.copy(own, specs / "scheduler/cluster-init/files")
    with Site(["scheduler", *NODES], system, wheels=found) as site:
        slurm.install(site, PARTITIONS)
        made = Cluster(site, specs)
        said = {name: made.begin(name) for name in site.names}
        assert "pip" not in "".join(said[node] for node in NODES)
        made.idle()
        yield made


def test_slurm_has_what_the_scripts_wrote_and_the_specs_own_tests_pass(cluster: Cluster) -> None:
    config = cluster.scheduler.ask("scontrol", "show", "config")
    assert "HealthCheckProgram      = /sched/trial/hpc-mp-health" in config and "nohold_on_prolog_fail" in config
    assert "max_switch_wait=24:00:00" in config, "what was there stays"
    failed = {(name, ran.script): ran.said for name in cluster.site.names
              for ran in jetpack.tests(cluster.site[name], ORDER[name]) if ran.code}
    if resource.getrlimit(resource.RLIMIT_MEMLOCK)[1] != resource.RLIM_INFINITY:  # this machine's root cannot give it
        assert {script for _, script in failed} == {"default/tests/limits.sh"}
        assert all("kB of locked memory" in said for said in failed.values())
    else:
        assert failed == {}


def test_the_doctor_finds_no_error_on_any_node(cluster: Cluster) -> None:
    for name in NODES:
        code, said = cluster.site[name].run(["/shared/hpc-mp/bin/hpc-mp", "doctor", "--node", "--json"])
        found = json.loads(said)["findings"]
        assert code == 0 and len(found) > 20, said
        assert [each for each in found if each["severity"] == "error"] == []


def test_healthagents_program_is_still_called_on_every_node(cluster: Cluster) -> None:
    seen = cluster.site.directory / "sched/trial/seen"
    counted = [cluster.site[name].root / "run/hpc-mp/counters.json" for name in NODES]  # by the doctor beside it
    shutil.rmtree(seen, ignore_errors=True)
    for file in counted:
        file.unlink(missing_ok=True)
    left = [*(seen / name for name in NODES), *counted]
    wait_until(lambda: all(file.exists() for file in left), "every node's health was asked", 60)


def test_a_training_over_all_nodes(cluster: Cluster) -> None:
    home = cluster.site.directory / HOME[1:]
    home.mkdir()
    (home / "text.md").write_text((ROOT / "docs/user/jobs.md").read_text())
    (home / "job.toml").write_text(JOB)
    for path in (home, *home.iterdir()):
        os.chown(path, 65534, 65534)
    command = ["bash", "--login", "-c", f"cd {HOME} && exec hpc-mp launch job.toml --on slurm --wait --json"]
    code, said = cluster.scheduler.run(command, user="nobody", environ={"HOME": HOME, "USER": "nobody"}, timeout=600)
    assert code == 0 and '"state": "completed"' in said, said
    run = home / "runs/trial/0001"
    assert {json.loads(line)["host"] for line in (run / "ranks.jsonl").read_text().splitlines()} == set(PARTITIONS["hpc"])
    assert len((run / "metrics.jsonl").read_text().splitlines()) == 3
    assert 'profile = "ethernet"' in (run / "job.toml").read_text()  # of /etc/hpc-mp/site.toml


def test_a_node_with_a_fault_gets_no_job_and_says_why(cluster: Cluster) -> None:
    cluster.idle()
    ill = cluster.site["hpc-1"]  # the first that Slurm takes
    infiniband(ill)
    try:
        for _ in range(5):  # a machine with much else to do lets a gate run out of its 5 s, which then lets the job in
            number = one_job(cluster)
            if cluster.job(number)["BatchHost"] != "hpc-1":
                break
        assert cluster.job(number)["BatchHost"] in ("hpc-2", "hpc-3")
        assert cluster.job(number)["Restarts"] == "1", "it was queued again, not held"
        drained = slurm.node(cluster.scheduler, "hpc-1")
        assert "DRAIN" in drained["State"] and "hpc-mp:fabric-port:mlx5_ib0 port 1" in drained["Reason"]
    finally:
        no_infiniband(ill)
        cluster.scheduler.run(["scontrol", "update", "NodeName=hpc-1", "State=RESUME"])
    assert cluster.job(one_job(cluster, "--nodelist=hpc-1"))["BatchHost"] == "hpc-1", "well again, it gets jobs"


def one_job(cluster: Cluster, *options: str) -> str:
    """Of one node, to its end; its number."""
    command = ["sbatch", "--parsable", "--nodes=1", "--output=/dev/null", "--wrap=hostname", *options]
    number = cluster.scheduler.ask(*command).strip()
    wait_until(lambda: cluster.job(number)["JobState"] == "COMPLETED", f"job {number} completed", 180, 0.5)
    return number


def switches(cluster: Cluster) -> list[str]:
    said = cluster.scheduler.run(["scontrol", "show", "topology"])[1]
    lines = (line.split() for line in said.splitlines() if line.startswith("SwitchName="))
    return [f"{line[0]} {line[3]}" for line in lines]


def test_the_topology_is_switched_on_taken_back_and_switched_off(cluster: Cluster) -> None:
    sched, scheduler = cluster.site.directory / "sched", cluster.scheduler
    shutil.copy(jetpack.PROGRAMS / "azslurm", scheduler.root / "usr/local/bin/azslurm")
    (sched / "azslurm-topology.txt").write_text(TREE)
    (sched / "sharp").touch()
    files = [sched / "trial" / name for name in ("site_specific.conf", "topology.conf")]
    plain = [file.read_text() for file in files]
    assert switches(cluster) == []

    assert "Slurm has a tree of 3 nodes" in scheduler.ask("hpc-mp-topology", timeout=120)
    known = ["SwitchName=sw00 Nodes=hpc-[1-2]", "SwitchName=sw01 Nodes=hpc-3", "SwitchName=sw02 Nodes=hpc-[1-3]",
             "SwitchName=elsewhere Nodes=htc-1"]
    assert switches(cluster) == known
    assert (sched / "azslurm-calls").read_text().startswith("topology --use_fabric_manager --partition hpc --output ")
    assert "SuspendExcParts         = hpc" in scheduler.ask("scontrol", "show", "config")
    cluster.idle()
    assert len(scheduler.ask("srun", "--nodes=3", "hostname").split()) == 3
    assert "htc-1" in scheduler.ask("srun", "--partition=htc", "hostname")

    on = [file.read_text() for file in files]
    (sched / "broken.txt").write_text(BLOCKS)
    code, said = scheduler.run(["hpc-mp-topology", "block", "--input", "/sched/broken.txt"], timeout=120)
    assert code == 1 and "taken back, Slurm goes on as before" in said and "unrecognized key: Block" in said, said
    assert [file.read_text() for file in files] == on and switches(cluster) == known

    (sched / "half.txt").write_text(TREE.replace("SwitchName=sw01 Nodes=hpc-3\n", "").replace("sw00,sw01", "sw00"))
    code, said = scheduler.run(["hpc-mp-topology", "tree", "--input", "/sched/half.txt"], timeout=120)
    assert code == 1 and "hpc-3 of hpc are not in it" in said and switches(cluster) == known

    assert "no topology any more" in scheduler.ask("hpc-mp-topology", "off", timeout=120)
    assert switches(cluster) == [] and [file.read_text().strip() for file in files] == [text.strip() for text in plain]


def test_twice_and_after_a_reimage(cluster: Cluster) -> None:
    """/etc and all else that a machine has written, and what lies on /sched and /shared, are the same each time."""
    site = cluster.site

    def everything() -> dict[str, str]:
        folders = [site.written(name) for name in site.names] + [site.directory / "sched/trial/prolog.d"]
        links = {name: os.readlink(site.directory / "shared/hpc-mp" / name) for name in ("current", "bin/hpc-mp")}
        site_conf = {"site": (site.directory / "sched/trial/site_specific.conf").read_text()}
        return {f"{folder} {path}": state for folder in folders for path, state in tree(folder).items()} | links | site_conf

    before = everything()
    for name in site.names:
        jetpack.forget(site[name])
        assert "installed" not in cluster.converge(name)
    assert differences(before, everything()) == []

    slurm.link(site.reimage("hpc-2"))
    assert not (site["hpc-2"].root / "etc/hpc-mp").exists()
    cluster.begin("hpc-2")
    slurm.link(site.reimage("scheduler"))
    assert "0.1.0-" in cluster.begin("scheduler")
    cluster.idle()
    assert len(cluster.scheduler.ask("srun", "--nodes=3", "hostname").split()) == 3
    kept = {path: state for path, state in everything().items() if "etc/hpc-mp" in path or "libexec" in path or " " not in path}
    assert {path: before[path] for path in kept} == kept
