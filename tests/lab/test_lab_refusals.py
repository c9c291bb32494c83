"""What ``hpc-mp lab`` refuses and says without a cluster that is up."""

import os
import sys
from pathlib import Path

import pytest
from click.testing import CliRunner
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import BadNode, bad_nodes, ledger, record
from hpc_mp_lab import keeper
from hpc_mp_lab.cluster import LabCluster
from hpc_mp_lab.command import _say, chosen, command, down, forget, up
from hpc_mp_lab.lab import Lab


def refused(*words: str) -> str:
    with pytest.raises(HpcMpError) as found:
        CliRunner().invoke(up, list(words), catch_exceptions=False)
    return str(found.value)


def test_not_root(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 1000)
    monkeypatch.setattr(sys, "argv", ["/where it is/hpc-mp", "lab", "up", "--nodes", "3"])
    said = refused("--nodes", "3")
    assert "needs root" in said and "`sudo '/where it is/hpc-mp' lab up --nodes 3`" in said
    with pytest.raises(HpcMpError, match="needs root"):
        CliRunner().invoke(down, [], catch_exceptions=False)


def files_of(etc: Path) -> None:
    etc.mkdir(parents=True)
    (etc / "nodes").write_text("n1 n2\n")
    (etc / "name").write_text("lab30\n")
    (etc / "slurm.conf").touch()


@pytest.fixture
def several(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """Where the files of three clusters lie that are up: `lab`, `two`, and `new`, which has but begun to start."""
    for name in ("lab", "two"):
        files_of(tmp_path / f"{keeper.PREFIX}{name}" / "etc")
    (tmp_path / "site.conf").symlink_to(tmp_path / f"{keeper.PREFIX}two" / "etc" / "slurm.conf")
    monkeypatch.setattr(keeper, "STATE", tmp_path)
    monkeypatch.setattr(keeper, "names", lambda: ["lab", "new", "two"])
    monkeypatch.delenv("SLURM_CONF", raising=False)
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("conf", "name", "meant"), table(__file__, "lab_refusals.toml", "several_clusters"))
def test_of_several_clusters_that_of_slurm_conf_is_meant(several: Path, monkeypatch: pytest.MonkeyPatch, conf: str | None,
                                                         name: str | None, meant: str | None) -> None:
    if conf is not None:
        monkeypatch.setenv("SLURM_CONF", conf.format(several))
    if meant is not None:
        assert chosen(name).directory == several / f"hpc-mp-{meant}"
    else:
        with pytest.raises(HpcMpError, match=r"3 clusters are up: lab, new, two\. Select one with --name"):
            chosen(name)


@pytest.mark.parametrize(("name", "words"), [("two", "lab down --name two"), ("lab", "lab down")])
def test_the_end_of_a_cluster_that_is_up_is_said_with_its_name(several: Path, monkeypatch: pytest.MonkeyPatch,
                                                               capsys: pytest.CaptureFixture[str], name: str, words: str) -> None:
    """At its start, and where it is up already."""
    monkeypatch.setattr(sys, "argv", ["/bin/hpc-mp"])
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    _say(Lab(several / f"hpc-mp-{name}", (("n1",),)), name, 1.0, False)
    assert f"The cluster runs until `sudo /bin/hpc-mp {words}`." in capsys.readouterr().out
    monkeypatch.setattr("hpc_mp_lab.command._refuse", lambda accounting: None)
    monkeypatch.setattr(keeper, "start", lambda lab, say: False)
    assert f"or end it with `sudo /bin/hpc-mp {words}`" in refused("--name", name)


@pytest.mark.parametrize(("verb", "runs", "said"), [("kill", False, "boot"), ("boot", True, "kill"), ("at", False, "boot")])
def test_a_hint_for_a_node_names_its_cluster(several: Path, monkeypatch: pytest.MonkeyPatch, verb: str, runs: bool, said: str,
                                             ) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr(LabCluster, "runs", lambda *_: runs)
    for name, option in (("two", " --name two"), ("lab", "")):
        with pytest.raises(HpcMpError, match=f"`hpc-mp lab {said}{option} n1`"):
            CliRunner().invoke(command, [verb, "--name", name, "n1", *(["true"] if verb == "at" else [])], catch_exceptions=False)


def test_not_linux(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "platform", "darwin")
    assert "needs namespaces of Linux" in refused()


def test_no_packages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "geteuid", lambda: 0)
    monkeypatch.setattr("shutil.which", lambda program: None)
    said = refused("--accounting")
    packages = "slurm-wlm slurm-client munge iproute2 util-linux slurmdbd mariadb-server-core mariadb-client-core"
    assert f"`apt-get install --no-install-recommends {packages}`" in said and "systemctl mask munge" in said


@pytest.mark.parametrize(("words", "said"), table(__file__, "lab_refusals.toml", "options"))
def test_options_that_cannot_be(words: tuple[str, ...], said: str) -> None:
    done = CliRunner().invoke(up, list(words))
    assert said in (str(done.exception) if isinstance(done.exception, HpcMpError) else done.output)
    assert done.exit_code == 2 or isinstance(done.exception, HpcMpError)


def test_bad_nodes_of_an_earlier_cluster_are_forgotten(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    monkeypatch.delenv("SUDO_USER", raising=False)
    files_of(tmp_path / "etc")
    for name in ("lab30", "lab31"):
        record(ledger(name), [BadNode("n2", "lost", "gone", "run", 0.0, 1e12)])
    forget(LabCluster(tmp_path))
    assert bad_nodes(ledger("lab30")) == {} and bad_nodes(ledger("lab31"))
