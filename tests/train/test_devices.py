"""The devices of ranks: NCCL where each has a GPU of its own, however few each one sees; a shared one is refused."""

import os
import re
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from ranks import run_ranks

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.rank.devices import CPU, NCCL, SHARED, Seat, agree_on_devices, device_choice, own_gpu, prepare
from hpc_mp.train.rank.rendezvous import meet, rendezvous

OWN = [Seat("n1", "GPU-a"), Seat("n1", "GPU-b"), Seat("n2", "GPU-c"), Seat("n2", "GPU-d")]
SAME = [Seat("n1", "GPU-a"), Seat("n1", "GPU-b"), Seat("n1", "GPU-a")]
BLIND = [Seat("n1", "GPU-a"), Seat("n1"), Seat("n2"), Seat("n2")]


@pytest.mark.parametrize(("requested", "seats", "shares", "choice"), [
    ("auto", OWN, False, NCCL), ("cuda", OWN, False, NCCL), ("cpu", OWN, False, CPU), ("auto", BLIND, False, CPU),
    ("cuda", SAME, True, SHARED), ("auto", SAME, True, CPU), ("cpu", [Seat("n1")], False, CPU), ("auto", OWN[:1], False, NCCL)])
def test_the_choice(requested: str, seats: list[Seat], shares: bool, choice: str) -> None:
    assert device_choice(requested, seats, shares) == choice


@pytest.mark.parametrize(("requested", "seats", "message"), [
    ("auto", SAME, r"ranks 0, 2 on n1: would share one GPU \(GPU-a\). Give each rank a GPU of its own: lower job.ranks_per_node"),
    ("cuda", SAME, r"--gpus-per-task, --gpu-bind\). On CPUs: job.device = \"cpu\""),
    ("cuda", BLIND, r"job.device = cuda: torch \S+ sees no GPU on n1, n2. Install")])
def test_what_cannot_be_is_refused(requested: str, seats: list[Seat], message: str) -> None:
    with pytest.raises(HpcMpError, match=message):
        device_choice(requested, seats, False)


def test_variables_of_cuda_are_set_before_its_first_use_and_none_that_somebody_has_set(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("CUDA_MODULE_LOADING", "PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF", "CUDA_DEVICE_MAX_CONNECTIONS"):
        monkeypatch.delenv(name, raising=False)
    before: list[dict[str, str]] = []
    monkeypatch.setattr(torch.cuda, "is_available", lambda: bool(before.append(dict(os.environ))))
    assert own_gpu("cpu", identity({})) is None and not before
    assert own_gpu("auto", identity({})) is None
    assert (before[0]["CUDA_MODULE_LOADING"], before[0]["CUDA_DEVICE_MAX_CONNECTIONS"]) == ("EAGER", "32")
    assert before[0]["PYTORCH_ALLOC_CONF"] == "expandable_segments:True"
    decided = {"CUDA_MODULE_LOADING": "LAZY", "PYTORCH_CUDA_ALLOC_CONF": "max_split_size_mb:64"}
    assert prepare(decided) == ["CUDA_DEVICE_MAX_CONNECTIONS"] and decided["CUDA_MODULE_LOADING"] == "LAZY"


def _agreed(uuids: list[str], visible: int, emulated: bool) -> tuple[str, str, int]:
    """A rank that sees so many GPUs, and takes the one with this rank's UUID."""
    who = identity(os.environ)
    os.environ["HPC_MP_EMULATED"] = "1" if emulated else "0"
    current: list[Any] = []
    torch.cuda.is_available = lambda: True
    torch.cuda.device_count = lambda: visible
    torch.cuda.set_device = current.append
    torch.cuda.get_device_properties = lambda device: SimpleNamespace(uuid=uuids[who.rank])
    _, keys = meet(who, rendezvous(None))
    device, backend = agree_on_devices("auto", who, keys)
    keys.set(f"done {who.rank}", "")
    if who.rank == 0:
        keys.get("done 1")  # the store ends with this rank
    return str(device), backend, len(current)


def test_a_rank_that_sees_one_gpu_of_eight_takes_nccl() -> None:
    assert run_ranks(2, _agreed, ["GPU-a", "GPU-b"], 1, False) == [("cuda:0", NCCL, 1)] * 2
    assert run_ranks(2, _agreed, ["GPU-a", "GPU-b"], 8, False) == [("cuda:0", NCCL, 1), ("cuda:1", NCCL, 1)]


def test_two_ranks_of_one_gpu_are_refused_on_both_unless_nodes_are_emulated() -> None:
    with pytest.raises(RuntimeError, match=re.escape("ranks 0, 1 on ")) as refused:
        run_ranks(2, _agreed, ["GPU-a", "GPU-a"], 1, False)
    assert "would share one GPU (GPU-a)" in str(refused.value) and "DistNetworkError" not in str(refused.value)
    assert run_ranks(2, _agreed, ["GPU-a", "GPU-a"], 1, True) == [("cpu", "gloo", 0)] * 2
