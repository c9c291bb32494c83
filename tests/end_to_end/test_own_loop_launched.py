"""``demo/own_loop.py`` under every launcher: the same losses as in one process."""

import os
import re
import shutil
import socket
import subprocess
import sys
from pathlib import Path

import pytest
from lab_runs import GLOO, hpc_mp, logs_of, newest, run_words
from slurm_lab.lab import Lab

from hpc_mp.rundir import read_lines
from hpc_mp.train.own_loop.parallel import PATIENCE_S

pytestmark = [pytest.mark.prove, pytest.mark.timeout(300)]

ROOT = Path(__file__).parents[2]
DEMO = ROOT / "demo" / "own_loop.py"
PATH = f"{Path(sys.executable).parent}:{os.environ['PATH']}"
TORCHRUN, MPIRUN = (shutil.which(name, path=PATH) for name in ("torchrun", "mpirun"))
LOSSES = re.compile(r"loss (\S+) -> (\S+)")
CLEAN = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")} | {
    "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", "GLOO_SOCKET_IFNAME": "lo", "OMPI_ALLOW_RUN_AS_ROOT": "1",
    "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1", "OMPI_MCA_rmaps_base_oversubscribe": "1",
    "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe"}
WORDS = {
    "torchrun": [TORCHRUN, "--nproc-per-node", "4", str(DEMO)],
    "mpirun": [MPIRUN, "-n", "4", sys.executable, str(DEMO)],
}


def said(output: str) -> tuple[str, str]:
    """The first and the last loss, which one rank alone has printed."""
    found = LOSSES.findall(output)
    assert len(found) == 1, output
    return found[0]


@pytest.fixture(scope="module")
def expected() -> tuple[str, str]:
    """Of one process of two stages."""
    text = DEMO.read_text().replace("pp_size=2", "pp_size=1")
    done = subprocess.run([sys.executable, "-c", text], capture_output=True, text=True, timeout=100, env=CLEAN)
    assert done.returncode == 0, done.stderr
    first, last = said(done.stdout)
    assert float(first) > 5 and float(last) < 3, "it learns"
    return first, last


@pytest.mark.parametrize("launcher", WORDS)
def test_a_launcher_of_this_machine(launcher: str, expected: tuple[str, str]) -> None:
    if WORDS[launcher][0] is None:
        pytest.skip(f"{launcher} is not installed")
    done = subprocess.run(WORDS[launcher], capture_output=True, text=True, timeout=200, env=CLEAN)
    assert done.returncode == 0, done.stderr
    assert said(done.stdout) == expected


PROGRAM = """
import sys, hpc_mp, own_loop
rank = int(sys.argv[1])
run = hpc_mp.parallel(own_loop.MODEL, tp_size=2)
run.step(own_loop.batch_of(0))
print("here", flush=True)
{end}
run.step(own_loop.batch_of(1))
"""
ENDS = {  # the end of a program -> exit codes of ranks 0 and 1; rank 0 waits for rank 1 in a step
    "sys.exit(7)": (7, 7), "rank and sys.exit(3)": (1, 3), "1 // (1 - rank)": (1, 1), "pass": (0, 0)}


@pytest.mark.parametrize("end", ENDS)
def test_every_rank_keeps_its_exit_code_and_none_waits(end: str) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = str(server.getsockname()[1])
    environ = CLEAN | {"PYTHONPATH": f"{ROOT}:{DEMO.parent}", "WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    ranks = [subprocess.Popen([sys.executable, "-c", PROGRAM.format(end=end), rank], stdout=subprocess.PIPE,
                              stderr=subprocess.PIPE, env=environ | {"RANK": rank, "LOCAL_RANK": rank}) for rank in "01"]
    assert [rank.stdout.readline() for rank in ranks if rank.stdout is not None] == [b"here\n"] * 2
    errors = [rank.communicate(timeout=PATIENCE_S - 10)[1] for rank in ranks]
    assert tuple(rank.returncode for rank in ranks) == ENDS[end], errors


def test_hpc_mp_run_on_four_hosts_records_every_step(lab: Lab, here: Path, expected: tuple[str, str]) -> None:
    done = hpc_mp(lab, here, *run_words([sys.executable, str(DEMO)], "--wait", *GLOO, nodes=4, per_node=1))
    assert done.returncode == 0, done.stdout + done.stderr + logs_of(newest(here))
    steps = list(read_lines(newest(here).metrics))
    assert [line["step"] for line in steps] == list(range(1, 31))
    assert (f"{steps[0]['loss']:.3f}", f"{steps[-1]['loss']:.3f}") == expected


SCRIPTS = {
    "srun": "srun -n 4 -N 4 {python} {demo}",
    "srun torchrun": "srun -N 2 --ntasks-per-node=1 {python} -m torch.distributed.run --nnodes 2 --nproc-per-node 2 "
                     "--rdzv-backend c10d --rdzv-endpoint $(scontrol show hostnames | head -1):29511 {demo}",
}


@pytest.mark.parametrize("name", SCRIPTS)
def test_a_plain_job_script(lab: Lab, here: Path, name: str, expected: tuple[str, str]) -> None:
    script = here / "job.sh"
    script.write_text("#!/bin/bash\nexport GLOO_SOCKET_IFNAME=eth0 OMP_NUM_THREADS=1\n"
                      + SCRIPTS[name].format(python=sys.executable, demo=DEMO) + "\n")
    done = lab.run(["sbatch", "--wait", "-N", "4", "-o", "out.txt", str(script)], cwd=here, timeout=250)
    output = (here / "out.txt").read_text()
    assert done.returncode == 0, output
    assert said(output) == expected
