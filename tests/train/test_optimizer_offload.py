"""Optimizer state in the host's memory or on a disk: the same training to the last bit, with little of the state in memory."""

from __future__ import annotations

import os
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path

import psutil
import pytest
import torch
from exact import EXACT, GPT2, LAYOUTS, LLAMA, TIED, Engine, Reference
from layouts import MODELS, job, run_engine, start
from ranks import run_ranks

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import dump_job
from hpc_mp.layout.models import read_shape, stage_layers
from hpc_mp.planner.device import Device, check_offload
from hpc_mp.planner.memory import state_bytes
from hpc_mp.rundir import RunDirectory, read_json, read_lines
from hpc_mp.train.engine import optimizer_state
from hpc_mp.train.engine.optimizer_state import Chunk, OnDevice, StateHome, StateShape, Streamed, Stretch, chunks
from hpc_mp.train.engine.state_stores import FileStore, HostStore

CPU = torch.device("cpu")


def small_chunks() -> None:
    """Many chunks, the last of each unit shorter."""
    optimizer_state.CHUNK = 1000


def on_disk(place: Path) -> list[str]:
    disk = place / "disk"
    disk.mkdir(exist_ok=True)
    return ['parallel.offload=["optimizer"]', f'parallel.offload_directory="{disk}"']


CASES = [("tp2 pp2 dp2 zero2", TIED), ("dp2 zero3", LLAMA), ("dp2 zero0", GPT2), ("dp4 zero1 shard2", GPT2),
         ("tp2 dp3 zero1", LLAMA),
         ("tp2 pp2 dp2 zero1 zero_bubble_v", LLAMA), ("pp2 interleaved_1f1b M2", TIED), ("tp4", GPT2)]
QUICK = ("tp2 pp2 dp2 zero2", "dp2 zero3")


@pytest.mark.parametrize(("name", "model"), [pytest.param(*case, marks=() if case[0] in QUICK else pytest.mark.prove)
                                             for case in CASES])
@pytest.mark.parametrize("precision", ["fp32", pytest.param("bf16", marks=pytest.mark.prove)])
def test_training_is_the_same_to_the_last_bit(place: Path, engine: Engine, name: str, model: str, precision: str) -> None:
    more = [f'train.precision="{precision}"', *LAYOUTS[name]]
    whole, _ = engine(model, *more)
    spec = job(place, model, [*more, *on_disk(place)])
    assert run_engine(spec, before=small_chunks).distance(whole) == 0
    assert not list((place / "disk").iterdir()), "no file has a name"


def test_with_momentum_and_in_fp64_too(place: Path, reference: Reference) -> None:
    sgd = ('train.optimizer="sgd"', "train.learning_rate=0.5", "train.momentum=0.9", "train.clip=0.0")
    for optimizer, more in (("sgd", sgd), ("adamw", ())):
        found = run_engine(job(place, GPT2, [*more, *on_disk(place)]), before=small_chunks)
        assert found.distance(reference(GPT2, optimizer)) < EXACT


def forget_a_chunk() -> None:
    """The negative control: what was written of one chunk is lost."""
    small_chunks()
    keep = FileStore.keep

    def kept(self: FileStore, number: int, source: torch.Tensor) -> None:
        if number != 3:
            keep(self, number, source)

    FileStore.keep = kept  # type: ignore[method-assign]


def test_a_lost_chunk_would_be_seen(place: Path, engine: Engine) -> None:
    whole, _ = engine(GPT2, 'train.precision="fp32"')
    spec = job(place, GPT2, ['train.precision="fp32"', *on_disk(place)])
    assert run_engine(spec, before=forget_a_chunk).distance(whole) > 0


def test_checkpoints_go_from_one_home_to_the_other(place: Path, engine: Engine) -> None:
    """Two steps with the state on a disk and two without, and the other way round, on other layouts."""
    whole, _ = engine(GPT2, "train.steps=4")
    disk, dp2, zero3 = on_disk(place), LAYOUTS["dp2 zero0"], LAYOUTS["dp2 zero3"]
    for first, second in (([*disk, *dp2], zero3), (dp2, [*disk, *zero3])):
        run = start(job(place, GPT2, ["train.steps=2", *first]))
        run_engine(job(place, GPT2, ["train.steps=2", *first]), before=small_chunks, run=run)
        assert relaunched(place, ["train.steps=4", *second], run).distance(whole) < EXACT


def relaunched(place: Path, overrides: list[str], run: RunDirectory) -> object:
    spec = job(place, GPT2, overrides)
    fresh = start(spec)  # for its placement
    run.job.write_text(dump_job(spec))
    run.placement.write_text(fresh.placement.read_text())
    return run_engine(spec, before=small_chunks, run=run)


@pytest.mark.parametrize(("name", "model"), [("tp2 pp2 dp2 zero2", TIED), ("dp2 zero3", LLAMA)])
def test_the_predicted_state_is_what_ranks_hold(place: Path, name: str, model: str) -> None:
    spec = job(place, model, ["train.steps=1", *LAYOUTS[name], *on_disk(place)])
    run = start(spec)
    run_engine(spec, run=run)
    shape = read_shape(spec)
    predicted = state_bytes(shape, spec, stage_layers(spec, shape))
    for line in read_lines(run.ranks):
        held, told = read_json(run.trace(line["rank"]))["memory"], predicted[line["pp"], line["tp"]]
        assert (held["optimizer"], held["host"], held["disk"]) == (told.optimizer, 0, told.disk)
    (there,) = {each.disk for each in state_bytes(shape, spec, stage_layers(spec, shape)).values()} if spec.ranks == 2 else (1,)
    assert there > 0


# --- the homes by themselves -----------------------------------------------------------------------------------------

SHAPE = StateShape({"one": 5000, "two": 704}, ("exp_avg", "exp_avg_sq"), torch.float32)
STRETCHES = [Stretch("one", 0, 3217, False), Stretch("one", 3217, 4999, True), Stretch("two", 0, 700, False)]


def test_chunks_begin_at_multiples_within_their_stretch(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "CHUNK", 1000)
    found = list(chunks(STRETCHES))
    assert [(chunk.unit, chunk.begin, chunk.end) for chunk in found] == [
        ("one", 0, 1000), ("one", 1000, 2000), ("one", 2000, 3000), ("one", 3000, 3217), ("one", 3217, 4217), ("one", 4217, 4999),
        ("two", 0, 700)]
    assert [len(chunk.stretches) for chunk in chunks([Stretch("one", 0, 300, False), Stretch("one", 300, 900, True)])] == [2]
    assert all(chunk.end - chunk.begin <= 1000 for chunk in found)


def trained(home: StateHome, masters: dict[str, torch.Tensor], steps: int) -> None:
    """Steps of AdamW with gradients that stay the same."""
    optimizers = []
    for turn in home.turns:
        parts = []
        for stretch, slots in turn:
            part = masters[stretch.unit][stretch.begin:stretch.end]
            part.grad = part.clone()
            parts.append((part, slots))
        made = torch.optim.AdamW([part for part, _ in parts], lr=1e-2, fused=True)
        for part, slots in parts:
            made.state[part] = {**slots, "step": torch.zeros((), dtype=torch.float32)}
        optimizers.append(made)
    for _ in range(steps):
        home.each(lambda number: optimizers[number].step())


def masters_of(shape: StateShape) -> dict[str, torch.Tensor]:
    return {unit: torch.linspace(-1, 1, length) for unit, length in shape.lengths.items()}


@pytest.mark.parametrize("store", ["host", "disk"])
def test_streaming_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    monkeypatch.setattr(optimizer_state, "CHUNK", 1000)
    open_store = HostStore if store == "host" else partial(FileStore, tmp_path)
    homes = OnDevice(SHAPE, STRETCHES, CPU), Streamed(SHAPE, STRETCHES, CPU, open_store)
    both = masters_of(SHAPE), masters_of(SHAPE)
    for home, masters in zip(homes, both, strict=True):
        trained(home, masters, 3)
    assert all(torch.equal(both[0][unit], both[1][unit]) for unit in SHAPE.lengths)
    arrays = [home.arrays() for home in homes]
    assert all(torch.equal(arrays[0][unit][slot], arrays[1][unit][slot]) for unit in SHAPE.lengths for slot in SHAPE.slots)
    assert float(arrays[1]["one"]["exp_avg"].abs().max()) > 0
    arrays[1]["two"]["exp_avg"].fill_(7)
    homes[1].release()
    assert float(homes[1].arrays()["two"]["exp_avg"][699]) == 7, "what was filled stays, also on the disk"
    sizes = homes[1].nbytes
    assert (sizes.host, sizes.disk)[store == "disk"] == SHAPE.nbytes and sizes.device == 2 * 2 * 4 * 5000


BIG = StateShape({"one": 6_000_000, "two": 2_000_000}, ("exp_avg", "exp_avg_sq"), torch.float32)  # 64 MB


def grown(directory: Path, streamed: bool) -> float:
    """How much of the state's bytes this process holds after two updates, and after its state was read, at most; what a fork
    shares with its parent and lets go makes it a little less."""
    optimizer_state.CHUNK = 2**17
    stretches = [Stretch(unit, 0, length, False) for unit, length in BIG.lengths.items()]
    masters = masters_of(BIG)
    trained(OnDevice(SHAPE, STRETCHES, CPU), masters_of(SHAPE), 1)  # what torch loads at a first use
    before = psutil.Process().memory_info().rss + sum(master.nbytes for master in masters.values())  # gradients come
    original = optimizer_state.buffer_elements
    optimizer_state.buffer_elements = lambda parts: min(optimizer_state.CHUNK, original(parts))
    home: StateHome = Streamed(BIG, stretches, CPU, partial(FileStore, directory)) if streamed else OnDevice(BIG, stretches, CPU)
    trained(home, masters, 2)
    after = psutil.Process().memory_info().rss
    for slots in home.arrays().values():
        for values in slots.values():
            assert float(values.abs().max()) > 0
            home.release()
    return (max(after, psutil.Process().memory_info().rss) - before) / BIG.nbytes


def test_less_than_a_tenth_of_the_state_is_in_memory(tmp_path: Path) -> None:
    (streamed,), (resident,) = (run_ranks(1, grown, tmp_path, streamed) for streamed in (True, False))
    assert resident > 0.7, "a process that holds all of it is seen, but for what it had free before"
    assert streamed < 0.1 and resident - streamed > 0.7


@pytest.mark.prove
def test_a_training_rank_holds_less_than_a_tenth_of_its_state(place: Path) -> None:
    """29 million parameters: the largest memory of a rank falls by more than nine tenths of its optimizer state."""
    MODELS["gpt2-larger"] = MODELS["gpt2"].replace("n_layer = 5, n_embd = 32, n_head = 8, n_inner = 102, vocab_size = 307",
                                                   "n_layer = 6, n_embd = 512, n_head = 8, vocab_size = 20000")
    more = ["train.steps=2", "train.global_batch=2", 'train.precision="fp32"']
    peaks, states = [], []
    for offload in ([], on_disk(place)):
        spec = job(place, "gpt2-larger", [*more, *offload])
        run = start(spec)
        run_engine(spec, run=run)
        held = read_json(run.trace(0))["memory"]
        peaks.append(held["peak"])
        states.append(held["optimizer"] if not offload else held["disk"])
    assert states[0] == states[1] > 200e6
    assert peaks[0] - peaks[1] > 0.9 * states[0]


# --- what is refused -------------------------------------------------------------------------------------------------


def test_offload_of_nothing_is_refused(place: Path) -> None:
    with pytest.raises(HpcMpError, match="has no effect: SGD without momentum has no state"):
        job(place, GPT2, ['train.optimizer="sgd"', *on_disk(place)])


def test_the_memory_of_a_cpu_is_the_hosts(place: Path) -> None:
    offloaded = job(place, GPT2, ['parallel.offload=["optimizer"]']).parallel
    with pytest.raises(HpcMpError, match="has no effect on CPUs: their memory is the host's"):
        check_offload(offloaded, Device("cpu", ""))
    check_offload(offloaded, Device("cuda", ""))
    check_offload(job(place, GPT2, on_disk(place)).parallel, Device("cpu", ""))


@pytest.mark.parametrize(("directory", "reason"), [
    (lambda path: path / "nowhere", "No such file or directory"), (lambda path: Path("/proc"), ".")])
def test_a_directory_that_cannot_hold_it_is_named(tmp_path: Path, directory: Callable[[Path], Path], reason: str) -> None:
    with pytest.raises(HpcMpError, match=f"cannot hold 45632 bytes of optimizer state on {os.uname().nodename} .*{reason}"):
        FileStore(directory(tmp_path), SHAPE, list[Chunk](), [torch.zeros(2, 8)])


def test_no_room_is_an_error_at_the_beginning(tmp_path: Path) -> None:
    endless = replace(SHAPE, lengths={"one": 2**50})
    with pytest.raises(HpcMpError, match="with room for all its ranks"):
        FileStore(tmp_path, endless, list[Chunk](), [torch.zeros(2, 8)])
