"""A dry run says of every rank to the byte what a real one holds, sends, opens and writes."""

import json
import os
import subprocess
import sys
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from click.testing import CliRunner
from exact import keyed
from layouts import job, layout
from ranks import run_ranks
from tables import table
from torch import Tensor
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_map_only

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.train import command
from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.layout.models import kv_copies
from hpc_mp.layout.schedule_of import schedule_of
from hpc_mp.planner.memory import state_bytes
from hpc_mp.planner.traffic import rank_traffic
from hpc_mp.rundir.rank_env import identity
from hpc_mp.train.checkpoint import checkpoint
from hpc_mp.train.checkpoint.shard_file import write_shard
from hpc_mp.train.dry_run.dry_run import DryRun, DryStep, dry_run, longest, needed, stepped
from hpc_mp.train.parallel.communicators import build
from hpc_mp.train.parallel.data_axis import DataAxis
from hpc_mp.train.rank import facts
from hpc_mp.train.rank.bootstrap import lay_out
from hpc_mp.train.rank.rendezvous import connect, meet, rendezvous

CPU = torch.device("cpu")
BF16 = 'train.precision="bf16"'
ON_CPU = 'job.device="cpu"'
SEPARATE = 'data.documents="separate"'

# name -> (model, overrides); what a rank of each does is compared for some ranks in ``make test``, for all in ``make prove``
CASES = keyed(table(__file__, "dry_run.toml", "cases"))
SOME = {"tp2 pp2 dp2 zero1 bf16": (7,), "dp4 zero3 shard2": (1,), "cp2 longrope": (1,)}


class PromptGloo(TorchDispatchMode):
    """Collectives of gloo that hold nothing any more once they have been waited for.

    gloo runs them on threads of its own, which let go of a tensor some time after ``wait`` has returned, a long time on a loaded
    machine: what the rank has dropped meanwhile would count as held. Here they get the memory without owning it, and this mode
    owns it for them until they are complete. Sends and receives run on no such thread.
    """

    def __init__(self) -> None:
        super().__init__()
        self.lent: list[tuple[dist.Work, list[Tensor]]] = []

    def __torch_dispatch__(self, function: Any, types: Sequence[type], args: Sequence[Any] = (),
                           kwargs: Mapping[str, Any] | None = None) -> Any:
        self.lent = [(work, owned) for work, owned in self.lent if not work.is_completed()]
        if function.namespace != "c10d" or function.name() in ("c10d::send", "c10d::recv_"):
            return function(*args, **(kwargs or {}))
        owners: dict[int, Tensor] = {}

        def lend(tensor: Tensor) -> Tensor:
            lent = unowned(tensor)
            owners[id(lent)] = tensor
            return lent

        lent = tree_map_only(Tensor, lend, args)
        result = function(*lent, **(kwargs or {}))
        work = result[-1] if isinstance(result, tuple) else result
        self.lent.append((dist.Work.unbox(work), list(owners.values())))
        return tree_map_only(Tensor, lambda tensor: owners[id(tensor)], result)


def unowned(tensor: Tensor) -> Tensor:
    """The same memory, which may go while this tensor is still there."""
    storage = tensor.untyped_storage()
    same = torch._C._construct_storage_from_data_pointer(storage.data_ptr(), storage.device, storage.nbytes())
    return tensor.new_empty(0).set_(same, tensor.storage_offset(), tensor.shape, tensor.stride())


@dataclass(frozen=True)
class Real:
    """What a real rank did: its step, the descriptors that meeting the others has opened, and the file that it saved."""

    step: DryStep
    opened: int
    saved: tuple[str, int]


def real_rank(spec: JobSpec, directory: Path) -> Real:
    before = len(os.listdir("/proc/self/fd"))
    who = identity(os.environ)
    store, _ = meet(who, rendezvous(None))
    host = connect(who, store, "gloo")
    shape = read_shape(spec)
    division = layout_of(spec, shape)
    schedule = schedule_of(division)
    groups = build(lay_out(spec), division.shard_degree, CPU, "gloo", schedule, None, host,
                   kv_copies(shape, division.degrees.tensor), expert_shards=division.expert_cut().shards)
    facts.gather("here", host)
    opened = len(os.listdir("/proc/self/fd")) - before
    with PromptGloo():
        engine, step = stepped(spec, shape, division, groups, schedule)
    shard = directory / checkpoint.SHARD.format(number=dist.get_rank() + 1)
    write_shard(shard, checkpoint.parts_to_write(engine.held()))
    facts.barrier(host)  # the last step's parameters may still be on their way
    return Real(step, opened, (shard.name, shard.stat().st_size))


@pytest.mark.parametrize(("name", "ranks"), [
    *(pytest.param(name, ranks, id=name, marks=() if name.startswith(("tp2", "cp2")) else pytest.mark.prove)
      for name, ranks in SOME.items()),
    *(pytest.param(name, None, id=f"{name}, all ranks", marks=pytest.mark.prove) for name in CASES)])
def test_a_dry_run_is_what_ranks_do(tmp_path: Path, name: str, ranks: tuple[int, ...] | None) -> None:
    model, overrides = CASES[name]
    spec = job(tmp_path, model, [ON_CPU, *overrides])
    real = run_ranks(spec.ranks, real_rank, spec, tmp_path)
    for rank in ranks or range(spec.ranks):
        dry = dry_run(spec, read_shape(spec), lay_out(spec), rank)
        assert dry.step == real[rank].step, f"rank {rank}"
        assert (dry.saving.files[0], dry.saving.bytes) == real[rank].saved
        if rank > 0:  # rank 0 holds the store too, which has threads and files of its own
            assert dry.sockets.descriptors == real[rank].opened


def test_a_dry_run_needs_no_disk_for_what_lies_on_one(tmp_path: Path) -> None:
    disk = tmp_path / "disk"
    disk.mkdir()
    here, nowhere = (job(tmp_path, "gpt2", [ON_CPU, *layout(data=2, zero=1), 'parallel.offload=["optimizer"]',
                                            f'parallel.offload_directory="{place}"']) for place in (disk, tmp_path / "nowhere"))
    dry, real = dry_run(nowhere, read_shape(nowhere), lay_out(nowhere), 1), run_ranks(2, real_rank, here, tmp_path)[1]
    assert dry.step == real.step and dry.step.state.disk > 0
    assert (dry.saving.files[0], dry.saving.bytes) == real.saved


def test_masks_of_separate_documents_are_one_for_each_microbatch_on_its_way(tmp_path: Path) -> None:
    length, samples = 512, 4
    longer = [f"model.config.n_positions={length}", f"data.sequence_length={length}"]

    def first_stage(*overrides: str) -> DryStep:
        spec = job(tmp_path, "gpt2", [ON_CPU, BF16, *longer, *layout(pipeline=2, microbatches=24 // samples), *overrides])
        return dry_run(spec, read_shape(spec), lay_out(spec), 0).step

    joined, separate = first_stage(), first_stage(SEPARATE)
    masks = separate.in_flight * samples * length * length * 2
    assert separate.in_flight == 2 and separate.peak.bytes - joined.peak.bytes == pytest.approx(masks, rel=0.1)


def test_a_rank_holds_no_more_with_more_microbatches(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither activations nor what it has sent. The negative control: a rank that keeps all of this to the end of the step."""
    def middle_stage(microbatches: int) -> int:
        spec = job(tmp_path, "llama", [ON_CPU, f"train.global_batch={2 * microbatches}", "train.steps=1",
                                       *layout(pipeline=3, microbatches=microbatches)])
        return dry_run(spec, read_shape(spec), lay_out(spec), 1).step.peak.bytes

    assert middle_stage(4) == middle_stage(6)
    monkeypatch.setattr("hpc_mp.train.pipeline.messages.arrivals", lambda schedule, rank: {})
    assert middle_stage(4) < middle_stage(6)


def test_a_message_more_would_be_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control: an engine that publishes twice, and keeps an array that it need not, is no longer the same."""
    spec = job(tmp_path, "llama", [ON_CPU, *layout(data=2)])
    honest = dry_run(spec, read_shape(spec), lay_out(spec), 1).step
    publish, begin, kept = DataAxis.publish, DataAxis.begin, []

    def twice(self: DataAxis) -> None:
        publish(self)
        publish(self)

    def greedy(self: DataAxis) -> None:
        kept.append(torch.zeros(1000))
        begin(self)

    monkeypatch.setattr(DataAxis, "publish", twice)
    monkeypatch.setattr(DataAxis, "begin", greedy)
    wasteful = dry_run(spec, read_shape(spec), lay_out(spec), 1).step
    assert wasteful.messages != honest.messages
    assert wasteful.peak.bytes == honest.peak.bytes + 4000


# --- what the planner says -------------------------------------------------------------------------------------------


def check_against_the_plan(spec: JobSpec, rank: int) -> DryRun:
    """Traffic of every axis and bytes of state are those of the planner."""
    shape = read_shape(spec)
    division = layout_of(spec, shape)
    found = dry_run(spec, shape, lay_out(spec), rank)
    planned = rank_traffic(division, shape, found.place.pp)
    sent: defaultdict[str, float] = defaultdict(float)
    for message in found.step.messages:
        if message.elements > 1 and "world" not in message.axis:  # but for the labels' number, and the last word
            sent[message.axis] += message.sent
    assert sent["tensor"] == pytest.approx(planned.tp, rel=1e-12)
    forward, backward = (sum(size for axis, size in sent.items() if axis.startswith("pipeline") and axis.endswith(payload))
                         for payload in "FB")
    assert max(forward, backward) == planned.pp
    assert sent["shard" if spec.shard_degree > 1 else "replicate"] == pytest.approx(planned.dp, rel=1e-12)
    assert sent["tied"] == planned.tied
    assert sent["expert"] == pytest.approx((spec.parallel.expert - 1) * planned.ep, rel=1e-12)
    assert sent["shard of experts"] + sent["replicate of experts"] == planned.expert_dp + planned.expert_replicas
    assert sent["context"] == planned.cp + (spec.parallel.context - 1) * planned.cp_pairs
    held = state_bytes(division, shape)[found.place.pp, found.place.tp]
    assert found.step.state.optimizer == held.optimizer
    if spec.reduce == "step":
        assert found.step.state.gradients == held.gradients
    if spec.parallel.zero <= 1:
        assert found.step.state == held
    return found


@pytest.mark.parametrize(("model", "overrides", "rank"), [
    ("llama-tied", layout(2, 2, 2, zero=1, microbatches=1), 6),
    ("gpt2", layout(1, 3, 2, zero=3, microbatches=2, partition=[0, 5, 0]), 4),
    ("llama", layout(2, 2, context=2, microbatches=1, recompute="full"), 6),
    ("llama-tied", layout(1, 2, 2, zero=3, microbatches=2, reduce="step"), 0),
    # as many rows for each expert as for any other
    ("mixtral with one choice of many experts", ["train.global_batch=40", *layout(data=4, expert=2, microbatches=2)], 2),
    ("llama", layout(2, context=4, context_method='"ulysses"', recompute="every-2"), 6),
    ("llama with two key-value heads", layout(3, context=2, context_method='"ulysses"'), 0),
    pytest.param("mixtral with one choice of many experts", [  # every token for every expert, which takes a quarter of them
        "train.global_batch=40", "model.config.num_experts_per_tok=40", "train.expert_capacity=0.25",
        *layout(data=4, expert=2, microbatches=2)], 2, marks=pytest.mark.prove),
    ("mixtral without groups or window", ["train.expert_capacity=0.25", *layout(
        2, context=2, sequence="true", tensor_modules=["*.self_attn"], microbatches=2, recompute="full")], 2),
    pytest.param("gpt2", layout(1, 2, 2, zero=3, microbatches=2), 0, marks=pytest.mark.prove)])
def test_the_planner_says_the_same(tmp_path: Path, model: str, overrides: list[str], rank: int) -> None:
    check_against_the_plan(job(tmp_path, model, [ON_CPU, BF16, *overrides]), rank)


LARGE = table(__file__, "dry_run.toml", "large")
SIZES = {
    "70B": "num_hidden_layers = 80, hidden_size = 8192, intermediate_size = 28672, num_attention_heads = 64",
    "405B": "num_hidden_layers = 126, hidden_size = 16384, intermediate_size = 53248, num_attention_heads = 128",
}


@pytest.mark.prove
@pytest.mark.parametrize(("size", "nodes", "pipeline", "batch", "rank"), table(__file__, "dry_run.toml", "large_models"))
def test_large_models(tmp_path: Path, size: str, nodes: int, pipeline: int, batch: int, rank: int) -> None:
    """Rank 0 also runs the command as a user gives it: it prints its CPU time, some 20 s; the timeout is for one that would take
    hours."""
    path = tmp_path / "job.toml"
    path.write_text(LARGE % SIZES[size])
    overrides = [f"job.nodes={nodes}", f"parallel.pipeline={pipeline}", f"train.global_batch={batch}"]
    step = check_against_the_plan(load_job(path, overrides), rank).step
    if rank > 0:
        return
    before = os.times()
    words = [word for each in overrides for word in ("--set", each)]
    answer = subprocess.run([sys.executable, "-m", "hpc_mp", "train", path, "--dry-run", "--rank", str(rank), "--json", *words],
                            check=True, capture_output=True, text=True, timeout=600)
    after = os.times()
    found = json.loads(answer.stdout)
    taken = after.children_user + after.children_system - before.children_user - before.children_system
    peak = found["peak"]["bytes"] / 2**30
    print(f"{size}, rank {rank} of {found['world']}: {taken:.1f} s of the processor, peak {peak:.1f} GiB")
    assert found["peak"]["bytes"] == step.peak.bytes


# --- the command -----------------------------------------------------------------------------------------------------


def test_the_command(tmp_path: Path) -> None:
    job(tmp_path, "gpt2")
    path = str(tmp_path / "gpt2.toml")
    overrides = [BF16, 'job.device="cuda"', *layout(2, 2, 2), "job.nodes=256", "train.global_batch=512", "parallel.order=cluster"]
    sizes = [word for each in overrides for word in ("--set", each)]
    shown = CliRunner().invoke(command, [path, "--dry-run", "--rank", "3", *sizes])
    assert shown.exit_code == 0, shown.output
    for word in ("rank 3 of 2,048 on cuda over NCCL: dp 0, pp 1, tp 1", "optimizer", "all-gather", "draws random values",
                 "shard-00004-model.safetensors"):
        assert word in shown.output
    away = CliRunner().invoke(command, [path, "--dry-run", "--rank", "3", *sizes, "--set", "parallel.zero=3", "--set",
                                        'parallel.offload=["parameters"]'])
    assert "parameters 0 B" in away.output and "in the host's memory" in away.output
    assert not list(tmp_path.glob("runs*"))  # nothing is written


@pytest.mark.parametrize(("options", "words"), table(__file__, "dry_run.toml", "refused"))
def test_what_cannot_be_is_refused(tmp_path: Path, options: list[str], words: str) -> None:
    job(tmp_path, "gpt2")
    with pytest.raises(HpcMpError, match=words):
        CliRunner().invoke(command, [str(tmp_path / "gpt2.toml"), *options], catch_exceptions=False)


def test_buffers_of_communicators_on_gpus_are_estimated(place: Path) -> None:
    """Pairs of tensor, data and end ranks, and the world, each with a ring and a tree; two channels with four thread blocks."""
    spec = job(place, "llama", [*layout(2, 2, data=2, microbatches=2), 'job.device="cuda"'])
    sockets = dry_run(spec, read_shape(spec), lay_out(spec), 0).sockets
    assert (sockets.nccl, sockets.buffers) == (6, (4 * 2 * 16 + 2 * 4) * 9_633_792)
    spec = job(place, "llama", layout(2, 2, data=2, microbatches=2))
    over_gloo = dry_run(spec, read_shape(spec), lay_out(spec), 0).sockets
    assert (over_gloo.nccl, over_gloo.buffers) == (0, 0)


def test_the_longest_sample_that_fits(place: Path) -> None:
    """It fits, and the next one tried does not; where nothing is too long for the memory, the model's positions are the limit."""
    def at(tokens: int) -> DryRun:
        spec = job(place, "llama", [*layout(2, 2, microbatches=2), 'job.device="cpu"', f"data.sequence_length={tokens}"])
        check_job(spec, read_shape(spec))
        return dry_run(spec, read_shape(spec), lay_out(spec), 0)

    sizes = {tokens: needed(at(tokens)) for tokens in (16, 24)}
    fit = longest(at, 24, 4, (sizes[16] + sizes[24]) // 2)
    assert 16 <= fit.tokens < 24 and fit.more is not None and fit.bytes <= fit.memory < fit.more_bytes
    assert fit.bytes == needed(at(fit.tokens)) and fit.more_bytes == needed(at(fit.more)) and not fit.limit
    fit = longest(at, 16, 4, 1 << 40)
    assert fit.tokens == 32 and fit.more is None and "longer than the model's 32 positions" in fit.limit
    fit = longest(at, 16, 4, sizes[16] // 100)
    assert (fit.tokens, fit.bytes, fit.more) == (0, 0, 4)
