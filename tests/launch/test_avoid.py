"""Nodes in the ledger are left out of new jobs, where that leaves enough."""

import time
from pathlib import Path

import pytest
from launching import make_run, the_run, write_job
from played_slurm import Cluster
from rendering import job as resolved_job
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.bad_nodes import BadNode, ledger, read_exclusions, record
from hpc_mp.cluster.slurm.query import NodeKind, SlurmPartition
from hpc_mp.job import AnySpec, load_any
from hpc_mp.job.resolution import resolved
from hpc_mp.launch.backends.slurm import rehearse
from hpc_mp.launch.choices import avoid
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.launch import LaunchRequest, plan_job
from hpc_mp.launch.run_files import script

PARTITION = SlurmPartition("all", True, True, None, (NodeKind(("n1", "n2", "n3", "n4"), 4, 2**30, ()),))


def bad(*nodes: str) -> dict[str, BadNode]:
    return {node: BadNode(node, "lost", f"{node} vanished", "run", 0.0, 1e12) for node in nodes}


def training(nodes: int, **extra: str) -> AnySpec:
    return resolved_job(job={"nodes": nodes}, slurm={"extra": extra})


@pytest.mark.parametrize(("nodes", "extra", "found", "down", "excluded", "words"), table(__file__, "avoid.toml", "bad_nodes"))
def test_bad_nodes(nodes: int, extra: dict[str, str], found: tuple[str, ...], down: tuple[str, ...], excluded: str,
                   words: str) -> None:
    """Nodes that are down are not among those that are enough."""
    spec = training(nodes, **extra)
    chosen = avoid(spec, ClusterFacts(partition=PARTITION, out_of_service=frozenset(down)), bad(*found))
    assert resolved(spec, [chosen]).slurm.extra == {**extra, **({"exclude": excluded} if excluded else {})}
    assert chosen.why.startswith(words) and bool(chosen.why) == bool(words)


@pytest.mark.parametrize(("found", "words"), table(__file__, "avoid.toml", "of_the_allocation"))
def test_nodes_of_the_allocation_around_a_job_are_not_avoided(found: tuple[str, ...], words: str) -> None:
    chosen = avoid(training(2), ClusterFacts(partition=PARTITION, allocation=("n1", "n2", "n3")), bad(*found))
    assert chosen.value is None and chosen.why.startswith(words) and bool(chosen.why) == bool(words) and "n4" not in chosen.why


# --- only with the nodes to avoid could the job start ----------------------------------------------------------------

AFTER_ALL = "not avoided, as the job could not start on the others: n1 (lost: n1 vanished)"
NODES = {"alike": 'echo "gpu*|up|1-00:00:00|64|512000|(null)|n[1-4]"',
         "two with memory": 'echo "gpu*|up|1-00:00:00|64|512000|(null)|n[1-2]"; echo "gpu*|up|1-00:00:00|64|8000|(null)|n[3-4]"'}
REFUSES = ('case "$*" in *--test-only*) ! grep -q -- --exclude=n1 || { echo "allocation failure: no" >&2; exit 1; };; esac\n'
           "echo 4242")


@pytest.fixture
def job(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A job of two nodes on a cluster whose ledger has n1."""
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path / "state home"))
    record(ledger("lab"), [BadNode("n1", "lost", "n1 vanished", "run", time.time(), time.time() + 3600)])
    return write_job(tmp_path)


def play(folder: Path, nodes: str, sbatch: str) -> Cluster:
    cluster = Cluster(folder)
    cluster.is_named()
    cluster.says("sinfo", f'case "$*" in *--Node*) for n in 1 2 3 4; do echo "n$n|idle|none"; done;; *) {NODES[nodes]};; esac')
    cluster.says("sbatch", sbatch)
    return cluster


@pytest.mark.parametrize("overrides", [(), ('sweep.runs=[{}, { "train.seed" = 2 }]',)], ids=["job", "sweep"])
@pytest.mark.parametrize(("nodes", "mem", "sbatch", "kept_off"), [
    pytest.param("alike", "100G", "echo 4242", ("n1",), id="the others suffice"),
    pytest.param("alike", "100G", REFUSES, (), id="Slurm refuses"),
    pytest.param("two with memory", "100G", "echo 4242", (), id="memory"),
    pytest.param("two with memory", "1G", "echo 4242", ("n1",), id="memory suffices")])
def test_a_job_that_could_not_start_on_the_others_gets_them(tmp_path: Path, job: Path, overrides: tuple[str, ...], nodes: str,
                                                            mem: str, sbatch: str, kept_off: tuple[str, ...]) -> None:
    play(tmp_path, nodes, sbatch)
    plans = plan_job(LaunchRequest(job, "slurm", (f'slurm.extra.mem="{mem}"', *overrides)))
    rehearsal = rehearse(plans, [tmp_path / str(number) for number, _ in enumerate(plans)])
    for plan in rehearsal.plans:
        (why,) = (key.why for key in plan.record.choices if key.key == "slurm.extra.exclude")
        assert why == (AFTER_ALL if not kept_off else "avoided: n1 (lost: n1 vanished)")
        assert tuple(each.node for each in plan.avoided) == kept_off
        assert ("--exclude=n1" in script(plan, tmp_path).text) == bool(kept_off) == ("exclude" in plan.spec.slurm.extra)
    assert (f"nodes     after all {AFTER_ALL}\n" in rehearsal.message) == (sbatch == REFUSES)


@pytest.mark.parametrize("program", [False, True], ids=["training", "program"])
@pytest.mark.parametrize(("sufferer", "resume", "kept_off"), table(__file__, "avoid.toml", "sufferers"))
def test_a_run_that_goes_on_is_kept_off_the_node_that_it_has_suffered_from(tmp_path: Path, job: Path, program: bool,
                                                                           sufferer: str, resume: bool, kept_off: str) -> None:
    """Of four nodes three are needed, and others remember newer faults of n1 and n2. Run 1 is the one to go on with."""
    if program:
        job.write_text('[job]\nname = "t"\nnodes = 3\n[program]\ncommand = ["true"]\nresumes = true\n')
    play(tmp_path, "alike", "echo 4242")
    run = make_run(load_any(job, () if program else ("job.nodes=3", "job.ranks_per_node=1", "train.global_batch=6")))
    (tmp_path / "link").symlink_to(tmp_path / "runs")
    now, by = time.time(), str(tmp_path / sufferer)
    record(ledger("lab"), [BadNode("n3", "unwritable", "n3 could not write", by, now - 9, now + 3600),
                           BadNode("n2", "lost", "n2 vanished", "run", now + 1, now + 3600)])
    [plan] = plan_job(LaunchRequest(run.job, "slurm", resume=resume))
    assert [bad.node for bad in plan.avoided] == [kept_off] and plan.spec.slurm.extra["exclude"] == kept_off


def test_what_slurm_refuses_on_all_nodes_is_refused(tmp_path: Path, job: Path) -> None:
    play(tmp_path, "alike", 'cat > /dev/null; echo "sbatch: error: Invalid account" >&2; exit 1')
    with pytest.raises(HpcMpError, match="Invalid account"):
        rehearse(plan_job(LaunchRequest(job, "slurm")), [tmp_path / "0"])


def test_a_launch_says_so_and_its_run_is_kept_off_no_node(tmp_path: Path, job: Path, mark: str) -> None:
    code, out, err = play(tmp_path, "alike", REFUSES).launch(mark, job, "--on", "slurm")
    run = the_run(job)
    assert code == 0 and f"after all {AFTER_ALL}" in " ".join((out + err).split()), err
    assert "--exclude" not in run.script.read_text() and not read_exclusions(run.excluded) and not run.watch_id.exists()
