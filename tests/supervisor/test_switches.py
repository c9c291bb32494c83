"""Who tells of the switches when a job starts: scontrol, Slurm's files, or the nodes; stand-ins, and a real Slurm."""

import shlex
import sys
import time
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path

import pytest
from launching import executable
from rendering import job
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.base.command import CommandFailed
from hpc_mp.cluster.bandwidth import LinkRates, write_measured
from hpc_mp.cluster.slurm.allocation import Allocation
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory, create_run
from hpc_mp.rundir.plan import RunPlan, Traffic, write_plan
from hpc_mp.supervisor.context import SupervisedRun
from hpc_mp.supervisor.prepare import begin
from hpc_mp.supervisor.switches import PATTERN, switches

HOSTS = ("n1", "n2", "n3", "n4")
SRUN = ("srun", "--export=ALL", "--nodes=4", "--relative=0", "--ntasks=8", "--label", "python")
CONF = "SwitchName={0}1 Nodes=n[1,3]\nSwitchName={0}2 Nodes=n[2,4]\nSwitchName=root Switches={0}[1-2]\n"
YAML = table(__file__, "switches.toml", "yaml")
TOLD = "".join(f"n{i} root.t{2 - i % 2}.n{i} switch.switch.node\n" for i in (3, 1, 4, 2))


class Says:
    """One answer to all questions, which are kept; None refuses."""

    def __init__(self, answer: str | None) -> None:
        self.answer, self.asked = answer, list[Sequence[str]]()

    def __call__(self, argv: Sequence[str]) -> str:
        self.asked.append(argv)
        if self.answer is None:
            raise CommandFailed("access denied")
        return self.answer


RING = RunPlan((1,), Traffic(dp=1e9), ())  # gradients of four replicas


def leaf(scontrol: str | None, slurm: Path, told: str | None = TOLD, srun: Sequence[str] = SRUN,
         **environ: str) -> tuple[str | None, str, int]:
    """The leaf switch of n3, who told, and how often the nodes were asked."""
    nodes = Says(told)
    tree, witness = switches(HOSTS, srun, Says(scontrol), nodes, environ, slurm)
    return tree.leaf("n3"), witness, len(nodes.asked)


def test_the_first_that_answers_is_believed(tmp_path: Path) -> None:
    etc, conf = tmp_path / "etc", tmp_path / "conf"
    etc.mkdir()
    conf.mkdir()
    named = {"SLURM_CONF": str(conf / "slurm.conf")}
    assert leaf(None, etc, **named) == ("t1", "the nodes", 1)
    (etc / "topology.conf").write_text(CONF.format("e"))
    assert leaf(None, etc) == leaf(None, etc, **named) == ("e1", f"{etc}/topology.conf", 0)
    (conf / "topology.conf").write_text(CONF.format("c"))
    assert leaf(None, etc, **named) == ("c1", f"{conf}/topology.conf", 0)
    (conf / "topology.yaml").write_text(YAML)
    assert leaf(None, etc, **named) == ("y1", f"{conf}/topology.yaml", 0)
    assert leaf(CONF.format("s"), etc, **named) == ("s1", "scontrol", 0)
    assert leaf("", etc, **named) == (None, "scontrol", 0)  # it answers: there are no switches


@pytest.mark.parametrize("useless", ["Something=else\n", CONF.format("s").replace("n[", "m["), "\xff"])
def test_what_tells_nothing_of_these_hosts_is_passed_over(tmp_path: Path, useless: str) -> None:
    (tmp_path / "topology.conf").write_text(useless, encoding="latin-1")
    assert leaf("Something=else", tmp_path) == ("t1", "the nodes", 1)


@pytest.mark.parametrize(("told", "expected"), [
    (None, (None, "nobody", 1)),
    ("", (None, "nobody", 1)),
    ("n3 root.n3 switch.switch.node", (None, "nobody", 1)),
    ("n1 n1 node\nn3 n3 node\n", (None, "nobody", 1)),
    (f"welcome to n3 of this site\nn9 root.t9.n9 switch.switch.node\nn1\n{TOLD}", ("t1", "the nodes", 1))])
def test_what_nodes_say(tmp_path: Path, told: str | None, expected: tuple[str | None, str, int]) -> None:
    assert leaf(None, tmp_path, told) == expected


def test_nodes_are_not_asked_in_vain(tmp_path: Path) -> None:
    assert leaf(None, tmp_path, **{PATTERN: "node"}) == (None, "nobody", 0)
    assert leaf(None, tmp_path, srun=()) == (None, "nobody", 0)
    assert leaf(None, tmp_path, srun=["mpirun", "python"]) == (None, "nobody", 0)
    nodes = Says(TOLD)
    switches(("n1",), SRUN, Says(None), nodes, {}, tmp_path)
    assert nodes.asked == []


@pytest.fixture
def conf(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The file in which a start looks for switches; neither scontrol nor the nodes tell of any."""
    monkeypatch.setenv("SLURM_CONF", str(tmp_path / "slurm.conf"))
    monkeypatch.setattr("hpc_mp.supervisor.switches.in_a_step", Says(None))
    return tmp_path / "topology.conf"


def order_of(run: RunDirectory, **parallel: str) -> tuple[tuple[str, ...], str]:
    """The hosts of a start of four replicas, in their order, and the reason of it."""
    spec, given = job(job={"nodes": 4}, parallel=parallel), Allocation("7", 0, HOSTS, "lab", None)
    begun = begin(SupervisedRun(run, spec, place(Degrees(data=4), "DPT", 1), given), Says(None))
    return begun.record.hosts, begun.host_order


def test_a_start_says_who_told_its_order(tmp_path: Path, conf: Path) -> None:
    run = create_run(tmp_path, "a")
    write_plan(run, RING)
    assert order_of(run) == (HOSTS, "rank map: in Slurm's order of hosts")
    conf.write_text(CONF.format("c"))
    hosts, words = order_of(run)
    assert hosts == ("n1", "n3", "n2", "n4") and words.endswith(f"; switches according to {conf}")
    assert order_of(run, rank_map="block") == (HOSTS, "parallel.rank_map = block")


def test_a_start_follows_the_rates_that_its_run_was_given(tmp_path: Path, conf: Path) -> None:
    run = create_run(tmp_path, "a")
    write_plan(run, RING)

    def hosts(cluster: str) -> tuple[tuple[str, ...], str]:
        """A ring of four replicas, n1–n2 at 10 % of the others."""
        rates = tuple((i, j, 0.1 if (i, j) == (0, 1) else 1.0) for i, j in combinations(range(4), 2))
        write_measured(run.measured, LinkRates(cluster, time.time(), HOSTS, rates))
        return order_of(run)

    assert hosts("another") == (HOSTS, "rank map: in Slurm's order of hosts")  # its n1 is another machine
    ordered, words = hosts("lab")
    assert abs(ordered.index("n1") - ordered.index("n2")) == 2, "neighbours in the ring"
    assert words.endswith("n1–n2 has 10 % of the usual rate: carries nothing")
    conf.write_text(CONF.format("c"))
    assert hosts("lab")[1].endswith(f"; switches according to {conf}")
    run.plan.unlink()
    assert hosts("lab") == (HOSTS, "rank map: in Slurm's order of hosts, because plan.json cannot be read")
    write_plan(run, RING)
    run.measured.write_text("{")
    with pytest.warns(UserWarning, match="measured bandwidths are unknown"):
        assert order_of(run)[0] == ("n1", "n3", "n2", "n4")  # switches


IN_A_JOB = """
import os, sys
from pathlib import Path
from hpc_mp.supervisor.switches import switches
nowhere = Path("/nonexistent")
srun = "srun --export=ALL --nodes=4 --relative=0 --ntasks=8 --ntasks-per-node=2 --label true".split()
for environ in os.environ, {"SLURM_CONF": "/nonexistent/slurm.conf"}:
    tree, witness = switches(("n1", "n2", "n3", "n4"), srun, environ=environ, folder=nowhere)
    print(witness, *map(tree.leaf, ("n1", "n2", "n3", "n4")))
"""


def test_a_real_slurm_without_scontrol(lab: Lab) -> None:
    """Its file is read; without that its nodes tell the same: the two leaves of the lab."""
    folder = lab.share / "topology"
    folder.mkdir()
    (folder / "ask.py").write_text(IN_A_JOB)
    executable(folder, "scontrol", "echo 'scontrol: error: Access denied' >&2\nexit 1")
    said = []
    for path in (folder, "/nonexistent"):
        job_id = lab.sbatch("--nodes=4", "--ntasks-per-node=2", f"--output={folder}/out", f"--chdir={folder}",
                            f"--wrap=PATH={path}:$PATH {shlex.quote(sys.executable)} ask.py")
        lab.wait_job(job_id)
        said.append((folder / "out").read_text().splitlines())
    leaves = " s1 s1 s2 s2"
    assert said == [[f"{Path(lab.environ['SLURM_CONF']).parent}/topology.conf{leaves}", f"the nodes{leaves}"],
                    [f"scontrol{leaves}"] * 2]
