"""Parameters in host memory: the same training to the last bit, with nothing of them on the device but what runs."""

from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from exact import EXACT, GPT2, LAYOUTS, LLAMA, MIXTRAL, ONE_STEP, OPTIMIZERS, TIED, Engine, Plain, cases, check_state, disk_of
from layouts import job, layout, relaunch, trained_run
from planting import planted, small_chunks, wrapped
from ranks import run_ranks

from hpc_mp.job.layout import layout_of, read_shape, undivided
from hpc_mp.layout import offload as layout_offload
from hpc_mp.layout.offload import CHUNK, GRAIN
from hpc_mp.planner.device import Device, check_offload
from hpc_mp.planner.memory import state_bytes
from hpc_mp.rundir.plan import StateBytes
from hpc_mp.train.device.precision import PRECISIONS
from hpc_mp.train.dry_run.dry_run import dry_run
from hpc_mp.train.optimizer.optimizer_state import OnDevice, StateShape, Stretch
from hpc_mp.train.parallel import host_parameters
from hpc_mp.train.parallel.collectives import Running
from hpc_mp.train.parallel.host_parameters import Bus, HostPart
from hpc_mp.train.rank.bootstrap import lay_out

CPU = torch.device("cpu")
PARAMETERS = 'parallel.offload=["parameters"]'
BOTH = 'parallel.offload=["optimizer","parameters"]'
ALL = 'parallel.offload=["optimizer","parameters","activations"]'
ALONE = [*layout(microbatches=2, zero=3)]  # one rank: all of a unit is its part


# (layout, model, format, what is offloaded)
CASES = [
    ("tp2 pp2 dp2 zero3", TIED, "bf16", [BOTH]), ("dp4 zero3 shard2", GPT2, "fp32", [PARAMETERS]),
    ("dp2 zero3", LLAMA, "bf16", [PARAMETERS]), ("dp2 zero3 once", LLAMA, "bf16", [BOTH]),
    ("tp2 pp2 dp2 zero3 zero_bubble", TIED, "fp32", [BOTH]), ("pp2 dp2 zero3 zero_bubble_v", LLAMA, "bf16", [PARAMETERS]),
    ("pp2 dp2 zero3 interleaved_1f1b once", TIED, "fp32", [ALL, "parallel.offload_horizon=0"]),
    ("pp3 dp2 zero3 layers 0+5+0", TIED, "bf16", [BOTH]), ("sp2 dp2 zero3", GPT2, "bf16", [BOTH]),
    ("dp2 cp2 zero3", LLAMA, "bf16", [BOTH]), ("ep2 dp4 zero3 shard2", MIXTRAL, "bf16", [BOTH]),
    ("ep2 zero3", MIXTRAL, "fp32", [BOTH])]
QUICK = [case for case in CASES if case[0] in ("tp2 pp2 dp2 zero3", "dp4 zero3 shard2", "pp2 dp2 zero3 interleaved_1f1b once")]


@pytest.mark.parametrize(("name", "model", "precision", "offload"), cases(CASES, QUICK))
def test_training_is_the_same_to_the_last_bit(place: Path, engine: Engine, name: str, model: str, precision: str,
                                              offload: list[str]) -> None:
    more = [f'train.precision="{precision}"', *LAYOUTS[name]]
    whole = engine(model, *more)
    assert run_engine(job(place, model, [*more, *offload]), before=small_chunks).distance(whole) == 0


def test_one_rank_with_its_optimizer_on_a_disk_too(place: Path, engine: Engine) -> None:
    """Where there is nobody to gather from, what is computed with comes from host memory all the same."""
    more = ['train.precision="bf16"', *ALONE]
    whole = engine(TIED, *more)
    assert run_engine(job(place, TIED, [*more, BOTH, disk_of(place)]), before=small_chunks).distance(whole) == 0


SETTINGS = {**OPTIMIZERS, "plain sgd": ('train.optimizer="sgd"', "train.learning_rate=0.5")}


@pytest.mark.parametrize("optimizer", cases(SETTINGS, OPTIMIZERS))
def test_it_equals_one_process(place: Path, plain: Plain, optimizer: str) -> None:
    """Also SGD, which has one number of state, or none."""
    settings = SETTINGS[optimizer]
    expected = plain(job(place, GPT2, settings))
    spec = job(place, GPT2, [*settings, *LAYOUTS["dp2 zero3"], PARAMETERS])
    assert run_engine(spec, before=small_chunks).distance(expected) < EXACT


def test_a_step_without_an_update_leaves_them(place: Path, engine: Engine) -> None:
    """fp16 whose first scale overflows: chunks come and go, and nothing changes."""
    more = ['train.precision="fp16"', "train.loss_scale={ initial = 1e9, hysteresis = 1 }", "train.steps=24",
            *LAYOUTS["dp2 zero3"]]
    whole = engine(LLAMA, *more)
    assert run_engine(job(place, LLAMA, [*more, BOTH]), before=small_chunks).distance(whole) == 0


# --- negative controls -----------------------------------------------------------------------------------------------


# The masters are updated, and ranks compute on with the values from before.
forget_what_computes = wrapped(HostPart, "keep", lambda keep: lambda part, begin, end, source: part.master[begin:end].copy_(
    source[:end - begin]))
# What computes is not made of the masters that have been read or drawn.
forget_first_values = wrapped(HostPart, "filled", lambda filled: lambda part: (
    part.computed.zero_() if part.computed is not part.master else None))


@planted(HostPart, "keep")
def forget_a_chunk(keep: Any, part: HostPart, begin: int, end: int, source: torch.Tensor) -> None:
    if begin != 1000:
        keep(part, begin, end, source)


LOST = {"what computes": forget_what_computes, "a chunk": lambda: (small_chunks(), forget_a_chunk()),
        "first values": forget_first_values}


@pytest.mark.parametrize("lost", cases(LOST, ("what computes",)))
def test_what_is_lost_would_be_seen(place: Path, engine: Engine, lost: str) -> None:
    more = ['train.precision="bf16"', *LAYOUTS["dp2 zero3"]]
    whole = engine(LLAMA, *more)
    assert run_engine(job(place, LLAMA, [*more, BOTH]), before=LOST[lost]).distance(whole) > 0


# --- checkpoints -----------------------------------------------------------------------------------------------------


def test_checkpoints_go_from_the_host_to_the_device_and_back(place: Path, engine: Engine) -> None:
    """Two steps with parameters in host memory and two without, on another layout, and the other way round."""
    whole = engine(GPT2, "train.steps=4")
    away, zero1 = [BOTH, *LAYOUTS["dp2 zero3"]], LAYOUTS["pp2 dp2 zero2 1f1b once"]
    for first, second in ((away, zero1), (zero1, away)):
        run = trained_run(job(place, GPT2, ["train.steps=2", *first]), small_chunks)
        assert relaunch(run, place, GPT2, ["train.steps=4", *second]).distance(whole) < EXACT


# --- where they lie --------------------------------------------------------------------------------------------------


HELD = [("tp2 pp2 dp2 zero3", TIED, ['train.precision="bf16"', BOTH]),
        ("dp4 zero3 shard2 once", GPT2, ['train.precision="fp32"', PARAMETERS]),
        ("ep2 zero3", MIXTRAL, ['train.precision="bf16"', PARAMETERS])]


@pytest.mark.parametrize(("name", "model", "more"), cases(HELD, HELD[:1]))
def test_the_predicted_state_is_what_ranks_hold(place: Path, engine: Engine, name: str, model: str, more: list[str]) -> None:
    keys = [ONE_STEP, *more, *LAYOUTS[name]]
    result = engine(model, *keys)
    check_state(job(place, model, keys), result)
    assert all(rank.memory["host"] > 0 == rank.memory["disk"] for rank in result.ranks)


def test_bytes_are_those_of_the_table(place: Path) -> None:
    """By hand, for one rank: 4 bytes of masters and 2 that compute on the host, two blocks on the device while they run, and two
    buffers of the shortest chunk, of two slots and a row for masters each."""
    shape, plan = read_shape(job(place, GPT2)), dict[str, StateBytes]()
    for offload in ("none", PARAMETERS, BOTH):
        more = [] if offload == "none" else [offload]
        spec = job(place, GPT2, ['train.precision="bf16"', *ALONE, *more])
        plan[offload] = state_bytes(layout_of(spec, shape), shape)[0, 0]
    part = plan["none"].gradients // 4
    block = 32 * 96 + 96 + 32 * 32 + 32 + 2 * 32 * 102 + 102 + 32 + 4 * 32 + 2  # the largest unit, and its padding
    assert plan["none"] == StateBytes(6 * part, 4 * part, 8 * part)
    assert (plan[PARAMETERS].host, plan[BOTH].host) == (6 * part, 14 * part)
    assert plan[PARAMETERS].optimizer - 8 * part == plan[BOTH].optimizer == 2 * 3 * 4 * GRAIN
    assert plan[PARAMETERS].parameters == plan[BOTH].parameters == 2 * 2 * block


@pytest.mark.parametrize("offload", cases((BOTH, PARAMETERS), (BOTH,)))
def test_a_dry_run_says_what_lies_where(place: Path, monkeypatch: pytest.MonkeyPatch, offload: str) -> None:
    monkeypatch.setattr(layout_offload, "GRAIN", CHUNK)  # a chunk for each unit: then there are no more counters of steps
    more = ['job.device="cpu"', 'train.precision="bf16"', *LAYOUTS["dp2 zero3"]]
    resident, away = (job(place, LLAMA, [*more, *each]) for each in ([], [offload]))
    there, here = (dry_run(spec, read_shape(spec), lay_out(spec), 0).step for spec in (resident, away))
    told = state_bytes(layout_of(away, read_shape(away)), read_shape(away))[0, 0]
    assert (here.state.host, here.state.optimizer, here.state.parameters) == (told.host, told.optimizer, 0)
    saved = there.state.parameters + there.state.optimizer - here.state.optimizer
    assert there.rest - here.rest == saved, "host memory is no part of the device's"
    for action in ("F", "B"):
        assert there.peaks[action].bytes - here.peaks[action].bytes == saved, "only what runs is on the device"
    assert here.messages == there.messages


def test_it_may_be_tried_on_cpus(place: Path) -> None:
    check_offload(undivided(job(place, GPT2, [*ALONE, PARAMETERS])), Device("cpu", ""))


def test_a_home_that_does_not_stream_takes_no_masters_elsewhere() -> None:
    part = HostPart(8, PRECISIONS["fp32"], Bus(CPU))
    with pytest.raises(ValueError, match="a home from which they stream"):
        OnDevice(StateShape({"one": 8}, (), torch.float32), [Stretch("one", 0, 8, False)], CPU, {"one": part})


def overtaken(waits: bool) -> bool:
    """On a GPU: whether each request gets the values of the update before it, among long computations."""
    if not waits:
        host_parameters.Bus.settle = lambda self: None  # type: ignore[method-assign]
    device, size = torch.device("cuda", 0), 2**24
    part = HostPart(size, PRECISIONS["bf16"], Bus(device))
    part.master.fill_(0)
    part.filled()
    own, busy, right = torch.empty(size, dtype=torch.bfloat16, device=device), torch.ones(4096, 4096, device=device), True
    for step in range(8):
        own.fill_(-1)
        arriving = part.arrive(own, Running)
        busy = busy @ busy * 1e-4
        arriving.wait()
        right &= bool((own == step).all())
        part.bus.settle()
        part.keep(0, size, torch.full((size,), step + 1.0, device=device))
    return right


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_streams_wait_for_each_other() -> None:
    assert run_ranks(1, partial(overtaken, True)) == [True]
