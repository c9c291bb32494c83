"""``hpc-mp bench`` on a real Slurm: as a job, as a step of an allocation, and over shaped links beside iperf3."""

import json
import shutil
import subprocess
import sys
from collections.abc import Iterator

import pytest
from nccl_tests_output import Output, parse
from slurm_jobs import until
from slurm_lab.lab import Lab
from tables import table

from hpc_mp.doctor.bench.result import TOLERANCE

BENCH = (sys.executable, "-c", "import sys; from hpc_mp.cli.bench import command\n"
         "sys.exit(command.main(sys.argv[1:], standalone_mode=False))")
SMALL = ("-w", "1", "--srun", "mem-per-cpu=400M")
RATE = "200mbit"
GIGABYTES = 0.025  # of RATE
WITHIN = 0.1


def bench(lab: Lab, *words: str, user: str | None = None, inside: tuple[str, ...] = (), code: int = 0, turns: int = 4) -> str:
    done = lab.run([*inside, *BENCH, *words, "-n", str(turns), *SMALL], user=user, timeout=240, environ={"PYTHONSAFEPATH": "1"})
    assert done.returncode == code, done.stdout + done.stderr + lab.logs()
    return done.stdout


def test_a_job_of_its_own_for_an_ordinary_user(lab: Lab) -> None:
    """Ranks on two hosts meet without a file that both see, and nothing is left in the queue."""
    output: Output = parse(bench(lab, "all_gather", "-b", "64K", "-e", "1M", "--on", "slurm", user="nobody"))
    assert [line.size for line in output.lines] == [65536, 262144, 1048576] and output.verdict == "OK"
    assert [(rank, host) for rank, _, _, host in output.devices] == [(0, "n1"), (1, "n2")]
    until(lambda: not lab.run(["squeue", "--noheader"]).stdout.strip(), "the queue is empty")


@pytest.mark.prove
def test_a_step_of_the_allocation_measures_its_rails(lab: Lab) -> None:
    """Inside salloc, whose other options srun would take for its own; two groups over both hosts at the same time."""
    inside = ("salloc", "--quiet", "--nodes=2", "--ntasks-per-node=2", "--cpus-per-task=2", "--mem-per-cpu=400M")
    text = bench(lab, "all_reduce", "--ranks-per-node", "2", "--split", "rail", "-b", "64K", "-e", "64K", inside=inside)
    assert [(rank, group, host) for rank, group, _, host in parse(text).devices] == [
        (0, 0, "n1"), (1, 1, "n1"), (2, 0, "n2"), (3, 1, "n2")]
    assert "2 groups at the same time" in text and parse(text).out_of_bounds == 0


def iperf(lab: Lab, *how: str) -> float:
    """GB/s that arrive between n1 and n2, in the slower direction if there are two."""
    server = lab.popen(["srun", "--nodelist=n2", "--nodes=1", "--ntasks=1", "iperf3", "--server", "--one-off"],
                       stdout=subprocess.DEVNULL)
    try:
        until(lambda: "LISTEN" in lab.at("n2", ["ss", "--no-header", "--listening", "--tcp", "sport", "=", ":5201"]).stdout,
              "iperf3 listens")
        client = ["srun", "--nodelist=n1", "--nodes=1", "--ntasks=1", "iperf3", "--client", "n2", "--time", "4", "--json", *how]
        done = lab.run(client, check=True, timeout=60)
        assert server.wait(30) == 0
    finally:
        server.kill()
        server.wait()
    end = json.loads(done.stdout)["end"]
    return min(end[name]["bits_per_second"] for name in end if name.startswith("sum_received")) / 8e9


@pytest.fixture(scope="module")
def wire(lab: Lab) -> Iterator[dict[str, float]]:
    """Shaped links, and what iperf3 gets through them; ``both``: each way while the other way is busy too."""
    lab.shape(RATE)
    try:
        yield {"one way": iperf(lab), "both": iperf(lab, "--bidir")}
    finally:
        lab.mend()


needs_iperf3 = pytest.mark.skipif(shutil.which("iperf3") is None, reason="no iperf3: apt-get install iperf3")


def measured(lab: Lab, name: str, nodes: int) -> float:
    """GB/s busbw at 4 MiB, of the placement that needs no copy."""
    text = bench(lab, name, "--nodes", str(nodes), "-b", "4M", "-e", "4M", "--json", turns=10)
    (result,) = json.loads(text)["results"]
    return float(result["in_place" if name in ("all_reduce", "broadcast") else "out_of_place"]["bus_bw"])


@pytest.mark.prove
@needs_iperf3
@pytest.mark.parametrize(("name", "nodes", "way", "sends", "within"), table(__file__, "bench_slurm.toml", "busbw", globals()))
def test_busbw_is_what_iperf3_gets_through_the_same_links(lab: Lab, wire: dict[str, float], name: str, nodes: int, way: str,
                                                          sends: int, within: float) -> None:
    found = sends * measured(lab, name, nodes)
    print(f"{name} on {nodes} hosts: {found * 8e3:.1f} Mbit/s on the wire, {sends} times busbw; iperf3 ({way}) "
          f"{wire[way] * 8e3:.1f}; ratio {found / wire[way]:.3f}")
    assert found == pytest.approx(wire[way], rel=within)


@pytest.mark.prove
@needs_iperf3
def test_a_slow_link_is_slow_beside_what_it_should_carry(lab: Lab, wire: dict[str, float]) -> None:
    words = ("all_reduce", "--nodes", "4", "-b", "4M", "-e", "4M", "--json", "--node-rate", str(GIGABYTES))
    (well,) = json.loads(bench(lab, *words))["expected"]
    assert well["verdict"] == "as expected" and abs(well["ratio"] - 1) < TOLERANCE
    lab.shape("100mbit", ["n3"])
    try:
        (slow,) = json.loads(bench(lab, *words, code=1))["expected"]
    finally:
        lab.shape(RATE, ["n3"])
    assert slow["verdict"] == "slow" and slow["ratio"] == pytest.approx(0.5, abs=0.1)
