"""What is expected of a run: the machine behind a GPU's name, bytes and seconds, and the pace that earlier runs teach."""

import json
from dataclasses import replace
from pathlib import Path

import pytest

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cluster.paces import PacedRun, ledger, pace, record
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models.reading import model_shape
from hpc_mp.layout.placement import Degrees
from hpc_mp.planner.expectation import expect, machine_of
from hpc_mp.planner.footprint import footprint
from hpc_mp.planner.memory import state_bytes
from hpc_mp.planner.step import step_time

GIB = 2**30
SHAPE = model_shape({"model_type": "llama", "num_hidden_layers": 2, "hidden_size": 1024, "num_attention_heads": 8,
                     "num_key_value_heads": 8, "intermediate_size": 4096, "vocab_size": 32000}, None)
LAYOUT = Layout(degrees=Degrees(tensor=2, pipeline=2, data=2), samples=1, sequence=2048, microbatches=4, layers=(1, 1),
                order="DPT", rank_map="block", ranks_per_node=8, zero=1, shard_degree=2, precision="bf16")


@pytest.fixture(autouse=True)
def own_ledger(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    return ledger()


@pytest.mark.parametrize(("name", "per_node", "model", "gib"), [
    ("NVIDIA H100 80GB HBM3", 8, "H100 80GB HBM3", 79.6), ("h100", 8, "H100 80GB HBM3", 79.6),
    ("nvidia_h100_80gb_hbm3", 4, "H100 80GB HBM3", 79.6), ("nvidia_a100-sxm4-80gb", 8, "A100-SXM4-80GB", 80.0),
    ("NVIDIA A100-SXM4-40GB", 8, "A100-SXM4-40GB", 40.0), ("a100_80gb", 8, "A100-SXM4-80GB", 80.0), ("h200", 8, "H200", 140.4),
    ("NVIDIA H200", 1, "H200", 140.4), ("AMD Instinct MI300X", 8, "MI300X", 192.0), ("p5", 8, "H100 80GB HBM3", 79.6),
    ("DGX-A100", 8, "A100-SXM4-80GB", 80.0), ("H100 NVL", 2, "H100 NVL", 93.6)])
def test_a_machine_is_known_by_the_name_of_its_gpu(name: str, per_node: int, model: str, gib: float) -> None:
    machine = machine_of(name, per_node)
    assert machine.gpu.name == model and machine.memory / GIB == pytest.approx(gib, abs=0.06) and machine.fabric.gpu == model


@pytest.mark.parametrize(("name", "per_node", "rule"), [
    ("a100", 8, "may be A100 40GB, A100 80GB"), ("h100", 2, "may be H100 80GB, H100 94GB NVL"), (None, 8, "nothing names"),
    ("l40s", 8, "no machine with it"), ("nvidia_rtx_4090", 8, "no machine with it"), ("gpu", 8, "no machine with it")])
def test_a_name_of_nothing_or_of_several_sizes_is_no_machine(name: str | None, per_node: int, rule: str) -> None:
    with pytest.raises(HpcMpError, match=rule):
        machine_of(name, per_node)


def test_the_machine_has_the_links_of_nodes_with_so_many_gpus() -> None:
    assert machine_of("h100", 8).fabric.gpus == 8 and machine_of("NVIDIA H100 NVL", 2).fabric.gpus == 2


def test_bytes_and_seconds_are_those_of_the_planner() -> None:
    machine = machine_of("h100", 8)
    expected, step = expect(LAYOUT, SHAPE, machine), step_time(LAYOUT, SHAPE, machine)
    assert (expected.seconds, expected.tokens_per_s, expected.mfu) == (step.seconds, step.tokens_per_s, step.mfu)
    assert expected.pace == 1
    assert sum(expected.parts.values()) == pytest.approx(expected.seconds)
    assert expected.tokens_per_s * expected.seconds == pytest.approx(2 * 4 * 2048), "the tokens of a step"
    held = state_bytes(LAYOUT, SHAPE)
    for pipeline, lines in enumerate(expected.needs):  # the state is exact
        assert sum(lines[name] for name in ("parameters", "gradients", "optimizer")) == max(
            held[pipeline, tensor].total for tensor in (0, 1))
        assert list(lines.values()) == sorted(lines.values(), reverse=True) and 0 not in lines.values()
    ranks = footprint(LAYOUT, SHAPE)
    fullest = max(ranks, key=lambda rank: rank.total)
    assert (expected.total, expected.allocated) == (fullest.total, fullest.counted)
    assert expected.memory == 81559 * 2**20
    away = replace(LAYOUT, offload=("optimizer",))
    assert footprint(away, SHAPE)[0].host > 0
    assert expect(away, SHAPE, machine).total == max(rank.total for rank in footprint(away, SHAPE)), "without the host's"


def test_ranks_on_cpus_hold_a_process_in_place_of_libraries() -> None:
    machine = machine_of("h100", 8)
    cpu = replace(machine, gpu=replace(machine.gpu, vendor="cpu"))
    with_gpus, without = expect(LAYOUT, SHAPE, machine), expect(LAYOUT, SHAPE, cpu)
    assert (with_gpus.on_gpus, without.on_gpus) == (True, False)
    assert without.allocated == without.total == with_gpus.allocated + (600 << 20)
    assert max(without.passes) < without.seconds and len(without.passes) == 2


def teach(file: Path, *ratios: float, gpu: str = "H100 80GB HBM3", first: int = 0) -> None:
    for number, ratio in enumerate(ratios, first):
        record(file, PacedRun(gpu, f"/runs/{number:04d}", 2.0, 2.0 * ratio))


def test_earlier_runs_teach_the_pace_of_their_gpu(own_ledger: Path) -> None:
    name = "H100 80GB HBM3"
    assert pace(own_ledger, name) == 1
    teach(own_ledger, 1.44)
    assert pace(own_ledger, name) == pytest.approx(1.2), "one run counts half"
    teach(own_ledger, 1.2, 1.2, 9.0, 1.2, 1.2, first=1)
    assert pace(own_ledger, name) == pytest.approx(1.2 ** (5 / 6)), "the median of the last five"
    assert pace(own_ledger, "H200") == 1, "another GPU"
    teach(own_ledger, *[1.1] * 5, first=1)  # the same runs, resumed
    assert pace(own_ledger, name) == pytest.approx(1.1 ** (5 / 6))
    teach(own_ledger, 40.0, 40.0, 40.0, first=20)
    assert pace(own_ledger, name) == pytest.approx(2 ** (5 / 6)), "no GPU is forty times slower than its peak"


def test_broken_lines_teach_nothing(own_ledger: Path) -> None:
    teach(own_ledger, 1.44)
    lines = ['{"gpu": 1}', "[]", json.dumps({"gpu": "H100 80GB HBM3", "run": "x", "predicted": 0.0, "measured": 1.0}), "{"]
    own_ledger.write_text(own_ledger.read_text() + "\n".join(lines))
    assert pace(own_ledger, "H100 80GB HBM3") == pytest.approx(1.2)
    assert pace(own_ledger.parent, "H100 80GB HBM3") == 1, "a folder is no ledger"


def test_the_next_prediction_has_the_pace(own_ledger: Path) -> None:
    machine = machine_of("h100", 8)
    before = expect(LAYOUT, SHAPE, machine)
    teach(own_ledger, 1.44)
    after = expect(LAYOUT, SHAPE, machine)
    assert after.seconds == pytest.approx(1.2 * before.seconds) and sum(after.parts.values()) == pytest.approx(after.seconds)
    assert after.tokens_per_s == pytest.approx(before.tokens_per_s / 1.2) and after.mfu == pytest.approx(before.mfu / 1.2)
    assert after.pace == pytest.approx(1.2) and after.needs == before.needs
