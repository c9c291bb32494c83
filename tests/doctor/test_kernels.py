"""``hpc-mp bench kernels``: the figures of a training's kernels, as rows that the planner reads."""

import json
import os
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
import tomli_w
import torch

from hpc_mp.doctor.compute.kernels import fitted, timed

SIZES = [(m, n, k) for m in (64, 512, 2048) for n, k in ((512, 512), (2048, 512), (1536, 1536))]


@pytest.mark.parametrize(("rate", "wave", "launch"), [(5e10, 0.0, 0.0), (4e14, 2e6, 5e-6), (4e14, 0.0, 5e-6)])
def test_the_figures_behind_times_are_found(rate: float, wave: float, launch: float) -> None:
    times = [(m, n, k, 2 * k * (m * n + wave) / rate + launch) for m, n, k in SIZES]
    np.testing.assert_allclose(fitted(times), (rate, wave, launch), rtol=1e-6, atol=1e-9)


def test_no_figure_is_negative() -> None:
    times = [(m, n, k, 2 * k * max(1.0, m * n - 3e4) / 5e10) for m, n, k in SIZES]  # small products are better than the others
    rate, wave, launch = fitted(times)
    assert rate > 0 and wave >= 0 and launch >= 0


def test_twice_the_work_takes_longer() -> None:
    small, large = (torch.randn(size, 64) for size in (64, 64 * 64))
    assert timed(lambda: large @ large.T, 0.5) > 2 * timed(lambda: small @ small.T, 0.5)


@pytest.mark.prove
def test_the_rows_of_this_machine_are_planned_with(tmp_path: Path) -> None:
    environ = os.environ | {"CUDA_VISIBLE_DEVICES": "", "HPC_MP_MACHINES": str(tmp_path / "machines.toml")}
    (tmp_path / "machines.toml").write_text("")

    def answer(*words: str) -> str:
        return subprocess.run([sys.executable, "-m", "hpc_mp", *words], env=environ, check=True, stdout=subprocess.PIPE,
                              text=True).stdout

    rows = json.loads(answer("bench", "kernels", "--node-rate", "0.025", "--json"))
    (gpu,), machine = rows["gpu"].values(), rows["site"]["processors"]
    assert machine["rdma_gbps"] == 0.2 and machine["gpus"] == 2 and machine["hop_us"] > 0
    assert min(gpu["memory_gbs"], gpu["nccl_link_gbs"], gpu["attention_share"], *gpu["peak_tflops"].values()) > 0
    plan = ("plan", "--model", "gpt2", "--machine", "processors", "--nodes", "2", "--precision", "fp32", "--json",
            "--sequence", "512", "--global-batch", "8")
    (tmp_path / "machines.toml").write_text(answer("bench", "kernels", "--node-rate", "0.025"))
    usual = json.loads(answer(*plan))["step"]["seconds"]
    gpu["peak_tflops"] = {name: rate / 10 for name, rate in gpu["peak_tflops"].items()}
    (tmp_path / "machines.toml").write_text(tomli_w.dumps(rows))
    assert json.loads(answer(*plan))["step"]["seconds"] > 3 * usual
