"""Optimizer state in the host's memory or on a disk: the same training to the last bit, with little of the state in memory."""

import os
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, ONE_STEP, OPTIMIZERS, TIED, Engine, Reference, cases, check_state, disk_of
from layouts import MODELS, job, relaunch, start, trained_run
from memory import measure_from_here
from planting import planted, small_chunks
from ranks import run_ranks, train

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import dump_job
from hpc_mp.job.layout import undivided
from hpc_mp.layout.offload import BUFFERS, CHUNK, GRAIN, chunk_elements
from hpc_mp.planner.device import Device, check_offload
from hpc_mp.rundir import checkpoint_index, read_json
from hpc_mp.train.checkpoint import shard_file
from hpc_mp.train.checkpoint.shard_file import LocalPart
from hpc_mp.train.optimizer import optimizer_state
from hpc_mp.train.optimizer.optimizer_state import Chunk, OnDevice, StateHome, StateShape, Streamed, Stretch, chunks
from hpc_mp.train.optimizer.state_stores import FileStore, MemoryStore
from hpc_mp.train.step.memory import peak_bytes

CPU = torch.device("cpu")


def on_disk(place: Path) -> list[str]:
    return ['parallel.offload=["optimizer"]', disk_of(place)]


CASES = [("tp2 pp2 dp2 zero2", TIED), ("dp2 zero3", LLAMA), ("dp2 zero0", GPT2), ("dp4 zero1 shard2", GPT2),
         ("tp2 dp3 zero1", LLAMA),
         ("tp2 pp2 dp2 zero1 zero_bubble_v", LLAMA), ("pp2 interleaved_1f1b M2", TIED), ("tp4", GPT2)]


@pytest.mark.parametrize(("name", "model"), cases(CASES, CASES[:2]))
@pytest.mark.parametrize("precision", cases(("fp32", "bf16"), ("fp32",)))
def test_training_is_the_same_to_the_last_bit(place: Path, engine: Engine, name: str, model: str, precision: str) -> None:
    more = [f'train.precision="{precision}"', *LAYOUTS[name]]
    whole = engine(model, *more)
    assert run_engine(job(place, model, [*more, *on_disk(place)]), before=small_chunks).distance(whole) == 0
    assert not list((place / "disk").iterdir()), "no file has a name"


def test_with_momentum_and_in_fp64_too(place: Path, reference: Reference) -> None:
    for optimizer in OPTIMIZERS:
        found = run_engine(job(place, GPT2, [*OPTIMIZERS[optimizer], *on_disk(place)]), before=small_chunks)
        assert found.distance(reference(GPT2, *OPTIMIZERS[optimizer])) < EXACT


@planted(FileStore, "keep")
def forget_a_chunk(keep: Any, store: FileStore, number: int, source: torch.Tensor) -> None:
    if number != 3:
        keep(store, number, source)


def test_a_lost_chunk_would_be_seen(place: Path, engine: Engine) -> None:
    whole = engine(GPT2, 'train.precision="fp32"')
    spec = job(place, GPT2, ['train.precision="fp32"', *on_disk(place)])
    assert run_engine(spec, before=lambda: (small_chunks(), forget_a_chunk())).distance(whole) > 0


def test_checkpoints_go_from_one_home_to_the_other(place: Path, engine: Engine) -> None:
    """Two steps with the state on a disk and two without, and the other way round, on other layouts."""
    whole = engine(GPT2, "train.steps=4")
    disk, dp2, zero3 = on_disk(place), LAYOUTS["dp2 zero0"], LAYOUTS["dp2 zero3"]
    for first, second in (([*disk, *dp2], zero3), (dp2, [*disk, *zero3])):
        run = trained_run(job(place, GPT2, ["train.steps=2", *first]), small_chunks)
        assert relaunch(run, place, GPT2, ["train.steps=4", *second], small_chunks).distance(whole) < EXACT


@pytest.mark.parametrize(("name", "model"), [("tp2 pp2 dp2 zero2", TIED), ("dp2 zero3", LLAMA)])
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, name: str, model: str) -> None:
    keys = [ONE_STEP, *LAYOUTS[name], *on_disk(place)]
    result = engine(model, *keys)
    check_state(job(place, model, keys), result)
    assert all(rank.memory["disk"] > 0 == rank.memory["host"] for rank in result.ranks)


# --- the homes by themselves -----------------------------------------------------------------------------------------

SHAPE = StateShape({"one": 5000, "two": 704}, ("exp_avg", "exp_avg_sq"), torch.float32)
STRETCHES = [Stretch("one", 0, 3217, False), Stretch("one", 3217, 4999, True), Stretch("two", 0, 700, False)]


def test_chunks_begin_at_multiples_within_their_stretch() -> None:
    found = list(chunks(STRETCHES, 1000))
    assert [(chunk.unit, chunk.begin, chunk.end) for chunk in found] == [
        ("one", 0, 1000), ("one", 1000, 2000), ("one", 2000, 3000), ("one", 3000, 3217), ("one", 3217, 4217), ("one", 4217, 4999),
        ("two", 0, 700)]
    assert [len(chunk.stretches) for chunk in chunks([Stretch("one", 0, 300, False), Stretch("one", 300, 900, True)], 900)] == [2]
    assert all(chunk.end - chunk.begin <= 1000 for chunk in found)


@pytest.mark.parametrize("parts", [[2**17], [10**6, 7], [999_983] * 31, [3 * 10**7, 10**6], [10**9]])
def test_buffers_are_little_of_what_streams(parts: list[int]) -> None:
    elements = chunk_elements(parts)
    assert BUFFERS * elements <= sum(parts) / 16 and elements <= CHUNK and elements % GRAIN == 0


def test_a_chunk_is_no_longer_than_the_longest_part() -> None:
    assert chunk_elements([13, 700, 1]) == 700


def trained(home: StateHome, masters: dict[str, torch.Tensor], steps: int,
            look: Callable[[], None] = lambda: None) -> list[torch.optim.Optimizer]:
    """Steps of AdamW with gradients that stay the same; ``look`` is called after each turn's update. What has the gradients comes
    back."""
    optimizers: list[torch.optim.Optimizer] = []
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

    def update(number: int) -> None:
        optimizers[number].step()
        look()

    for _ in range(steps):
        home.each(update)
    return optimizers


def masters_of(shape: StateShape) -> dict[str, torch.Tensor]:
    return {unit: torch.linspace(-1, 1, length) for unit, length in shape.lengths.items()}


@pytest.mark.parametrize("store", ["host", "disk"])
def test_streaming_changes_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, store: str) -> None:
    monkeypatch.setattr(optimizer_state, "chunk_elements", lambda parts: 1000)
    open_store = partial(MemoryStore, "host") if store == "host" else partial(FileStore, tmp_path)
    homes = OnDevice(SHAPE, STRETCHES, CPU, {}), Streamed(open_store, SHAPE, STRETCHES, CPU, {})
    both = masters_of(SHAPE), masters_of(SHAPE)
    for home, masters in zip(homes, both, strict=True):
        trained(home, masters, 3)
    assert all(torch.equal(both[0][unit], both[1][unit]) for unit in SHAPE.lengths)
    arrays = [home.arrays() for home in homes]
    assert all(torch.equal(arrays[0][unit][slot], arrays[1][unit][slot]) for unit in SHAPE.lengths for slot in SHAPE.slots)
    assert float(arrays[1]["one"]["exp_avg"].abs().max()) > 0
    arrays[1]["two"]["exp_avg"].fill_(7)
    homes[1].release(arrays[1]["two"]["exp_avg"])
    assert float(homes[1].arrays()["two"]["exp_avg"][699]) == 7, "what was filled stays, also on the disk"
    sizes = homes[1].nbytes
    assert (sizes.host, sizes.disk)[store == "disk"] == SHAPE.nbytes and sizes.device == BUFFERS * 2 * 4 * 1000


def test_means_of_gradients_in_16_bits_are_rounded_after_each_update(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(optimizer_state, "chunk_elements", lambda parts: 1000)
    narrow = Streamed(partial(MemoryStore, "device", narrow=("exp_avg",)), SHAPE, STRETCHES, CPU, {})
    rounded, exact = OnDevice(SHAPE, STRETCHES, CPU, {}), OnDevice(SHAPE, STRETCHES, CPU, {})

    def round_means() -> None:
        for slots in rounded.arrays().values():
            slots["exp_avg"].copy_(slots["exp_avg"].bfloat16())

    looks = {narrow: lambda: None, rounded: round_means, exact: lambda: None}
    updated = {home: masters_of(SHAPE) for home in looks}
    for home, look in looks.items():
        trained(home, updated[home], 3, look)
    for unit in SHAPE.lengths:
        assert torch.equal(updated[narrow][unit], updated[rounded][unit])
        assert not torch.equal(updated[narrow][unit], updated[exact][unit])
        assert all(torch.equal(narrow.arrays()[unit][slot].float(), rounded.arrays()[unit][slot]) for slot in SHAPE.slots)
    assert narrow.nbytes.device == SHAPE.nbytes * 3 // 4 + BUFFERS * 2 * 4 * 1000


def test_a_run_goes_on_with_means_in_16_bits(place: Path, engine: Engine) -> None:
    exact = ['train.precision="fp32"', *LAYOUTS["dp2 zero3"]]
    keys = ['train.exp_avg_dtype="bf16"', *exact]
    whole = engine(GPT2, "train.steps=4", *keys)
    run = trained_run(job(place, GPT2, ["train.steps=2", *keys]))
    assert relaunch(run, place, GPT2, ["train.steps=4", *keys]).distance(whole) == 0
    assert 0 < whole.distance(engine(GPT2, "train.steps=4", *exact)) < 0.1
    check_state(job(place, GPT2, [ONE_STEP, *keys]), engine(GPT2, ONE_STEP, *keys))


# --- how much of it is in memory -------------------------------------------------------------------------------------

BIG = StateShape({"one": 11_000_000, "two": 4_000_000}, ("exp_avg", "exp_avg_sq"), torch.float32)  # 120 MB


def keep_all(self: FileStore, values: torch.Tensor) -> None:
    """The negative control: what has been looked at stays."""


def used(directory: Path, shape: StateShape, masters: dict[str, torch.Tensor], look: Callable[[], None]) -> None:
    """State in a file is updated, saved and loaded; ``look`` is called after each update."""
    stretches = [Stretch(unit, 0, length, False) for unit, length in shape.lengths.items()]
    home = Streamed(partial(FileStore, directory), shape, stretches, CPU, {})
    gradients = trained(home, masters, 2, look)
    parts = [LocalPart(f"{unit}.{slot}", tuple(values.shape), (slice(0, len(values)),), values, home.release)
             for unit, slots in home.arrays().items() for slot, values in slots.items()]
    shard_file.ShardReader(directory, shard_file.write_shard(directory / "shard", parts)).read(parts)
    for part in parts:
        assert all(float(values.abs().max()) > 0 for values in part.pieces())
    assert gradients, "they are there all the time"


def most_resident(directory: Path, release: Callable[[FileStore, torch.Tensor], None]) -> float:
    """How much of the state's bytes this process holds at most while it updates, saves and loads it."""
    measure_from_here()
    process, found = psutil.Process(), [0]

    def look() -> None:
        found.append(process.memory_info().rss)

    def released(self: FileStore, values: torch.Tensor) -> None:
        look()
        release(self, values)

    FileStore.release = released  # type: ignore[method-assign]
    checkpoint_index.BLOCK = shard_file.PIECE  # what a reader holds of any checkpoint is not what is asked for here
    used(directory, SHAPE, masters_of(SHAPE), look)  # torch and others load what they need at a first use
    masters = masters_of(BIG)
    before = process.memory_info().rss + sum(master.nbytes for master in masters.values())  # gradients come
    used(directory, BIG, masters, look)
    return (max(found) - before) / BIG.nbytes


@pytest.mark.parametrize(("release", "little"), [(FileStore.release, True), (keep_all, False)])
def test_less_than_a_tenth_of_the_state_is_in_memory(tmp_path: Path, release: Callable[[FileStore, torch.Tensor], None],
                                                     little: bool) -> None:
    (most,) = run_ranks(1, most_resident, tmp_path, release)
    print(f"resident of the state at most: {most:.3f}")
    assert most < 0.1 if little else most > 0.9, most


LARGER = MODELS["gpt2"].replace("n_layer = 5, n_embd = 32, n_head = 8, n_inner = 102, vocab_size = 307",
                                "n_layer = 6, n_embd = 512, n_head = 8, vocab_size = 20000")  # 29 million parameters


def peak_of_rank(job_file: Path, release: Callable[[FileStore, torch.Tensor], None]) -> int:
    """The largest memory of a rank from its start to its end."""
    measure_from_here()
    FileStore.release = release  # type: ignore[method-assign]
    assert train(job_file) == 0
    return peak_bytes(CPU)


@pytest.mark.prove
@pytest.mark.parametrize("name", ["one rank", "dp2 zero1", "dp2 zero0"])
def test_a_training_rank_holds_less_than_a_tenth_of_its_state(place: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """The largest memory of a rank falls by more than nine tenths of its optimizer state, in a run that begins and saves, and in
    one that goes on from there. There it does not where nothing is released: what was loaded is still there as they compute."""
    monkeypatch.setitem(MODELS, "gpt2-larger", LARGER)
    more = ["train.global_batch=6", 'train.precision="fp32"', *LAYOUTS.get(name, [])]

    def peaks(*offload: str, release: Callable[[FileStore, torch.Tensor], None] = FileStore.release) -> Iterator[list[int]]:
        """Of all ranks, in the first run and in the second one."""
        run = start(job(place, "gpt2-larger", [*more, *offload]))
        for steps in (2, 4):
            spec = job(place, "gpt2-larger", [f"train.steps={steps}", *more, *offload])
            run.job.write_text(dump_job(spec))
            yield run_ranks(spec.ranks, peak_of_rank, run.job, release, timeout=300.0)
        states.append(read_json(run.trace(0))["memory"]["disk" if offload else "optimizer"])

    states: list[int] = []
    disk = on_disk(place)
    resident, streamed, kept = list(peaks()), list(peaks(*disk)), list(peaks(*disk, release=keep_all))
    assert states[0] == states[1] > 100e6
    fallen = [[(here - there) / states[0] for here, there in zip(*both, strict=True)]
              for both in zip(resident, streamed, strict=True)]
    print(f"{name}: memory of ranks falls by {fallen} of {states[0]} bytes")
    assert min(map(min, fallen)) > 0.9
    assert all(here - there < 0.5 * states[0] for here, there in zip(resident[1], kept[1], strict=True))


# --- what is refused -------------------------------------------------------------------------------------------------


def test_offload_of_nothing_is_refused(place: Path) -> None:
    with pytest.raises(HpcMpError, match="has no effect: SGD without momentum has no state"):
        job(place, GPT2, ['train.optimizer="sgd"', *on_disk(place)])


def test_the_memory_of_a_cpu_is_the_hosts(place: Path) -> None:
    offloaded = undivided(job(place, GPT2, ['parallel.offload=["optimizer"]']))
    with pytest.raises(HpcMpError, match="has no effect on CPUs: their memory is the host's"):
        check_offload(offloaded, Device("cpu", ""))
    check_offload(offloaded, Device("cuda", ""))
    check_offload(undivided(job(place, GPT2, on_disk(place))), Device("cpu", ""))


@pytest.mark.parametrize(("directory", "reason"), [
    (lambda path: path / "nowhere", "No such file or directory"), (lambda path: Path("/proc"), ".")])
def test_a_directory_that_cannot_hold_it_is_named(tmp_path: Path, directory: Callable[[Path], Path], reason: str) -> None:
    with pytest.raises(HpcMpError, match=f"cannot hold 45632 bytes of optimizer state on {os.uname().nodename} .*{reason}"):
        FileStore(directory(tmp_path), SHAPE, list[Chunk](), [torch.zeros(2, 8)])


def test_no_room_is_an_error_at_the_beginning(tmp_path: Path) -> None:
    endless = replace(SHAPE, lengths={"one": 2**50})
    with pytest.raises(HpcMpError, match="with room for all its ranks"):
        FileStore(tmp_path, endless, list[Chunk](), [torch.zeros(2, 8)])
