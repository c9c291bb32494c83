"""The engine in a loop of one's own, as ``demo/own_loop.py`` shows it."""

import importlib.util
import os
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
