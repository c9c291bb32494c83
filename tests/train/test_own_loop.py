"""The engine in a loop of one's own, as ``demo/own_loop.py`` shows it."""

import importlib.util
import os
import socket
import subprocess
import sys
from pathlib import Path

import torch
import torch.distributed as dist
from ranks import run_ranks

DEMO = Path(__file__).parents[2] / "demo" / "own_loop.py"


def rank(store: Path) -> list[float]:
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=store.as_uri(), rank=int(os.environ["SLURM_PROCID"]), world_size=4)
    spec = importlib.util.spec_from_file_location("own_loop", DEMO)
    assert spec is not None and spec.loader is not None
    module = sys.modules["own_loop"] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    losses: list[float] = module.train()
    dist.barrier()
    return losses


def test_the_demo_learns_on_all_ranks_alike(tmp_path: Path) -> None:
    found = run_ranks(4, rank, tmp_path / "store")
    assert found[0][0] > 5 and found[0][-1] < 3
    assert found == [found[0]] * 4


LEAVES = """
import sys, torch, hpc_mp
torch.manual_seed(0)
run = hpc_mp.parallel(torch.nn.Sequential(torch.nn.Linear(2, 2)), loss_fn=lambda outputs, batch: (outputs.sum(), 1), seed=0,
                      batches="replica")
for step in range(3):
    if step == 1 and run.axes.dp.rank == 1:
        sys.exit(7)
    run.step({"input": torch.ones(1, 2)})
"""


def test_a_rank_that_leaves_keeps_its_code_and_the_others_say_which_it_was() -> None:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port = listener.getsockname()[1]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    ranks = [subprocess.Popen([sys.executable, "-c", LEAVES], stderr=subprocess.PIPE, text=True, env={
        **clean, "RANK": str(rank), "WORLD_SIZE": "2", "LOCAL_RANK": str(rank), "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}) for rank in range(2)]
    first, second = (rank.communicate(timeout=50)[1] for rank in ranks)
    assert [rank.returncode for rank in ranks] == [1, 7], first + second
    assert "rank 1: has ended its program after 2 calls" in first
