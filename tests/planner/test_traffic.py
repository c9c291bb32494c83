"""Bytes per axis: by hand for a large model, and compared with what running ranks hand to their collectives."""

import json
from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch.distributed as dist
from layouts import job, layout, run_whole, start, write_text
from tables import table

from hpc_mp.job import JobSpec, resolve
from hpc_mp.job.layout import layout_of, read_shape, undivided
from hpc_mp.planner.memory import BYTES
from hpc_mp.planner.traffic import rank_traffic, traffic_of
from hpc_mp.rundir.plan import Traffic
from hpc_mp.train.parallel import collectives
from hpc_mp.train.step.engine import Engine

COUNTED = 1  # the step whose bytes are counted: the first one also connects and allocates


def large(zero: int, microbatches: int = 1, precision: str = "bf16", **parallel: Any) -> JobSpec:
    """A model of 70 billion parameters at T4 P4 D4."""
    return resolve({
        "job": {"nodes": 8, "ranks_per_node": 8, "device": "cuda"},
        "model": {"config": {"model_type": "llama", "num_hidden_layers": 80, "hidden_size": 8192, "intermediate_size": 28672,
                             "num_attention_heads": 64, "num_key_value_heads": 8, "vocab_size": 32000}},
        "data": {"files": ["text"], "sequence_length": 4096},
        "parallel": {"tensor": 4, "pipeline": 4, "zero": zero, "microbatches": microbatches, **parallel},
        "train": {"steps": 1, "global_batch": 4 * microbatches, "precision": precision},
    }, Path("/"))


def sent(spec: JobSpec) -> Traffic:
    shape = read_shape(spec)
    return traffic_of(replace(undivided(spec), layers=(20, 20, 20, 20)), shape)


@pytest.mark.parametrize(("precision", "zero", "microbatches", "factor"), [
    # bytes per parameter, each × (D−1)/D: gradients are reduced in fp32 under bf16, parameters are gathered in bf16
    ("bf16", 0, 8, 4 + 4), ("bf16", 1, 8, 2 + 4), ("bf16", 2, 8, 2 + 8 * 4), ("bf16", 3, 8, 8 * (2 + 2 + 4)),
    ("fp32", 0, 8, 4 + 4), ("fp32", 1, 8, 4 + 4), ("fp32", 2, 8, 4 + 8 * 4), ("fp32", 3, 8, 8 * (4 + 4 + 4)),
    ("fp64", 1, 8, 8 + 8), ("bf16", 3, 1, 2 + 2 + 4)])
def test_bytes_per_parameter(precision: str, zero: int, microbatches: int, factor: int) -> None:
    layer = 8192 * (8192 + 2 * 1024) + 8192 * 8192 + 3 * 8192 * 28672
    held = 20 * (layer // 4 + 2 * 8192) + 8192 + 8192 * 32000 // 4  # norms are whole on every tensor rank; the last stage's head
    found = sent(large(zero, microbatches, precision))
    assert found.dp == pytest.approx(3 / 4 * held * factor)
    assert found.replicas == 0 and found.shards is None


@pytest.mark.parametrize(("zero", "microbatches", "factor"), [(2, 8, 2 + 4), (3, 8, 8 * (2 + 2) + 4), (3, 1, 2 + 2 + 4)])
def test_bytes_per_parameter_where_gradients_are_summed_once(zero: int, microbatches: int, factor: int) -> None:
    each, once = (sent(large(zero, microbatches, reduce=way)).dp for way in ("microbatch", "step"))
    assert once / each == pytest.approx(factor / (factor + (microbatches - 1) * 4))


def test_bytes_of_activations() -> None:
    activation = 4096 * 8192 * 2
    found = sent(large(1))
    assert found.pp == activation and sent(large(1, 8)).pp == 8 * activation
    loss = 3 * 4096 * 4
    assert found.tp == pytest.approx(2 * 3 / 4 * ((4 * 20 + 1) * activation + loss))  # the last stage: its head, and the loss
    assert found.tied == 0


def test_a_shard_degree_sends_less_around_a_ring_and_some_across() -> None:
    whole, cut = sent(large(1)), sent(large(1, shard_degree=2))
    part = whole.dp / (3 / 4 * 6) / 2
    assert cut.shards == 2
    assert cut.dp == pytest.approx((2 - 1) * part * 6)
    assert cut.replicas == pytest.approx(2 * 1 / 2 * part * 4)
    assert cut.dp < whole.dp < cut.data


def test_axes_of_degree_one_carry_nothing(tmp_path: Path) -> None:
    write_text(tmp_path)
    spec = job(tmp_path, "llama-tied")
    assert traffic_of(replace(undivided(spec), layers=(5,)), read_shape(spec)) == Traffic()


def count(folder: Path) -> None:
    """Have this rank write ``sent-RANK.json``: what it sends in one step by (axis, partner's side)."""
    sending: Counter[str] = Counter()
    axes: dict[Any, str] = {}

    def ring(name: str, factor: Callable[[int, Any, Any], float]) -> None:
        original = getattr(dist, name)

        def counting(*args: Any, **more: Any) -> Any:
            axis = axes.get(more.get("group"))
            if axis is not None:
                sending[axis] += factor(dist.get_world_size(more["group"]), args, more)
            return original(*args, **more)

        setattr(dist, name, counting)

    def payload(sent: Any) -> int:
        """A single number, the labels of a step, is no traffic."""
        return sent.nbytes if sent.numel() > 1 else 0

    def tensor(args: Any, more: Any, place: int, name: str) -> Any:
        return args[place] if len(args) > place else more[name]

    ring("all_reduce", lambda n, args, more: 2 * (n - 1) / n * payload(tensor(args, more, 0, "tensor")))

    def exchanged(n: int, args: Any, more: Any) -> float:
        """With sizes, those of what a context rank keeps are not sent; without them, each rank gets a part."""
        sizes = args[3] if len(args) > 3 else None
        kept = 1 / n if not sizes else axes[more["group"]] == "cp" and sizes[dist.get_rank(more["group"])] / sum(sizes)
        return (1 - kept) * tensor(args, more, 1, "input").nbytes

    ring("all_to_all_single", exchanged)
    gather = collectives.GATHER

    def gathering(whole: Any, part: Any, group: Any = None, async_op: bool = False) -> Any:
        if group in axes:
            sending[axes[group]] += (dist.get_world_size(group) - 1) * part.nbytes
        return gather(whole, part, group=group, async_op=async_op)

    collectives.GATHER = gathering
    ring("isend", lambda n, args, more: tensor(args, more, 0, "tensor").nbytes)
    step = Engine.step

    def counted(self: Engine, number: int, *rest: Any) -> Any:
        groups = self.groups
        named = {"tp": groups.tensor, "shard": groups.shard, "replicate": groups.replicate,
                 "tied": groups.ties[0, len(self.settings.schedule.placement) - 1],
                 "cp": groups.context, "ep": groups.expert, "expert shard": groups.experts.shard,
                 "expert replicate": groups.experts.replicate}
        axes.update({axis.group: name for name, axis in named.items() if axis.group})
        axes.update({groups.kv.group: "tp"} if groups.kv.group else {})
        ways = {"F": "next", "B": "previous"}
        axes.update({group: ways[payload] for (_, _, payload), group in groups.channels.groups.items()})
        sending.clear()
        result = step(self, number, *rest)
        if number == COUNTED:
            (folder / f"sent-{dist.get_rank()}.json").write_text(json.dumps(sending))
        return result

    Engine.step = counted  # type: ignore[method-assign]


def counted_run(place: Path, model: str, overrides: list[str]) -> tuple[JobSpec, list[tuple[dict[str, int], dict[str, float]]]]:
    """A run, and by rank: its line in the run directory, and what it sent."""
    spec = job(place, model, ["train.steps=2", 'job.device="cpu"', *overrides])
    began = start(spec)
    run_whole(spec, before=lambda: count(began.path), run=began)
    lines = sorted(map(json.loads, began.ranks.read_text().splitlines()), key=lambda line: line["rank"])
    return spec, [(line, json.loads((began.path / f"sent-{line['rank']}.json").read_text())) for line in lines]


def run(place: Path, model: str, overrides: list[str]) -> list[tuple[dict[str, float], dict[str, float]]]:
    """Of the first tensor rank of every stage: what it was predicted to send, and what it sent."""
    spec, ranks = counted_run(place, model, overrides)
    shape = read_shape(spec)
    division = layout_of(spec, shape)
    found = []
    for line, sent in ranks:
        if line["tp"] or line["dp"] or line["cp"]:
            continue
        t = rank_traffic(division, shape, line["pp"])
        ring = "shard" if spec.shard_degree > 1 else "replicate"
        first, last = line["pp"] == 0, line["pp"] == spec.parallel.pipeline - 1
        predicted = {"tp": t.tp, "next": 0 if last else t.pp, "previous": 0 if first else t.pp, "tied": t.tied, ring: t.dp,
                     "cp": t.cp + (spec.parallel.context - 1) * t.cp_pairs}
        if ring == "shard":
            predicted["replicate"] = t.replicas
        found.append(({axis: number for axis, number in predicted.items() if number},
                      {axis: number for axis, number in sent.items() if number}))
    assert len(found) == spec.parallel.pipeline
    return found


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("traffic")
    write_text(directory)
    return directory


CASES = {name: (more, layout(**degrees)) for name, (more, degrees) in table(__file__, "traffic.toml", "cases").items()}


# Every ZeRO stage meets bf16, where gradients and parameters differ; of what else is sent one case each.
QUICK = {*(f"dp2 zero{zero} bf16" for zero in range(4)), "dp2 zero3 fp32", "dp4 zero3 shard2 bf16", "tp2 pp2 dp2 zero1 bf16",
         "dp4 zero3 shard2 once", "tp2 dp2 zero2 sequence once",
         "pp2 dp2 cp2 ulysses bf16", "tp2 pp2 dp2 zero2 sequence", "tp3 cp2 shared heads ulysses", "tp2 pp2 zero_bubble every-2"}
assert CASES.keys() >= QUICK


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in QUICK else pytest.mark.prove) for name in CASES])
def test_ranks_send_what_was_predicted(place: Path, name: str) -> None:
    precision, degrees = CASES[name]
    model = "llama with two key-value heads" if "shared" in name else "llama-tied" if "pp" in name else "gpt2"
    for predicted, sent in run(place, model, [*precision, *degrees]):
        assert sent == pytest.approx(predicted, rel=1e-12)


@pytest.mark.parametrize("name", [pytest.param(f"dp2 zero{zero} bf16", marks=() if zero == 3 else pytest.mark.prove)
                                  for zero in range(4)])
def test_weights_beside_adapters_are_not_reduced(place: Path, name: str) -> None:
    precision, degrees = CASES[name]
    (predicted, sent), = run(place, "gpt2", ["lora.rank=3", *precision, *degrees])
    assert sent == pytest.approx(predicted, rel=1e-12)


@pytest.mark.parametrize(("model", "precision"), [
    ("mixtral", "bf16"), ("gptj", "bf16"), pytest.param("mixtral", "fp64", marks=pytest.mark.prove)])
def test_families_with_other_blocks_send_what_was_predicted(place: Path, model: str, precision: str) -> None:
    for predicted, sent in run(place, model, [f'train.precision="{precision}"', *layout(tensor=2, pipeline=2, microbatches=2)]):
        assert sent == pytest.approx(predicted, rel=1e-12)


@pytest.mark.prove
@pytest.mark.parametrize("partition", [[1, 4], [3, 2]])
def test_an_encoder_and_a_decoder_send_what_was_predicted(place: Path, partition: list[int]) -> None:
    """Tables of positions cross with hidden states, as wide as those of the rank with the most heads."""
    rows = ['data.format="prompt"', "data.prompt_length=200", "data.sequence_length=400", 'train.precision="bf16"']
    pairs = run(place, "t5", [*rows, *layout(tensor=2, pipeline=2, partition=partition, microbatches=2)])
    assert [[numbers.get("next"), numbers.get("previous")] for numbers, _ in pairs] == [
        [numbers.get("next"), numbers.get("previous")] for _, numbers in pairs]


EXPERTS = {name: [*more, *layout(**degrees)] for name, (more, degrees) in table(__file__, "traffic.toml", "experts").items()}


@pytest.mark.parametrize("name", [pytest.param(name, marks=() if name in ("ep2 dp4 zero1", "tp2 ep2 full") else pytest.mark.prove)
                                  for name in EXPERTS])
def test_shared_out_experts_send_what_was_predicted(place: Path, name: str) -> None:
    """What experts' state sends, to the byte; and what tokens do, over the ranks of an expert group: each of these sends by what
    its router says, and together they send every choice of every token to some rank and back."""
    spec, ranks = counted_run(place, "mixtral", ['train.precision="bf16"', *EXPERTS[name]])
    shape = read_shape(spec)
    t = rank_traffic(layout_of(spec, shape), shape, 0)
    sent = [each for line, each in ranks if line["tp"] == 0]
    experts = spec.parallel.expert
    assert sum(each["ep"] for each in sent[:experts]) == pytest.approx(experts ** 2 * t.ep, rel=1e-12)  # to itself too
    first, rings = sent[0], ("shard", "replicate") if spec.shard_degree > 1 else ("replicate", "shard")
    assert [first.get(ring, 0) for ring in rings] == pytest.approx([t.dp, t.replicas], rel=1e-12)
    of_experts = first.get("expert shard", 0), first.get("expert replicate", 0)
    assert sum(of_experts) == pytest.approx(t.expert_dp + t.expert_replicas, rel=1e-12)
    assert first.get("tp", 0) == pytest.approx(t.tp, rel=1e-12)


def test_a_spoiled_table_is_seen(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: with gradients counted in the compute format, bf16 would move 4 bytes instead of 6."""
    monkeypatch.setitem(BYTES, "bf16", (2, 2))
    (predicted, sent), = run(place, "gpt2", ['train.precision="bf16"', *layout(data=2, zero=1)])
    assert sent["shard"] / predicted["shard"] == pytest.approx(6 / 4)
