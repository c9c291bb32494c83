"""Every layout equals one process of plain transformers and torch.optim, in fp64 to 1e-12."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import permutations, product
from pathlib import Path

import pytest
from layouts import VARIANTS, Result, job, layout, run_engine, run_plain, start, write_text
from safetensors import safe_open

from hpc_mp.layout.models import layer_costs, read_shape
from hpc_mp.layout.schedule.partition import stage_layers
from hpc_mp.planner import state_bytes
from hpc_mp.rundir import newest_complete, read_json, read_lines
from hpc_mp.train.engine import pipeline, tensor, zero
from hpc_mp.train.rank import trainer as loop

EXACT = 1e-12
WRONG = 1e-6  # a broken layout is off by at least this much


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("exact")
    write_text(directory)
    return directory


@pytest.fixture(scope="module")
def reference(place: Path) -> Callable[[str, str], Result]:
    """The plain result of a model with an optimizer; computed once."""

    @cache
    def compute(model: str, optimizer: str) -> Result:
        overrides = OPTIMIZERS[optimizer]
        one = run_engine(job(place, model, overrides))  # fills the token cache; one rank must be exact too
        plain = run_plain(job(place, model, overrides))
        assert plain.losses[0] - plain.losses[-1] > 1e-3, "the model must move, or nothing is shown"
        assert one.distance(plain) < EXACT
        return plain

    return compute


OPTIMIZERS = {
    "adamw": [],
    "sgd": ['train.optimizer="sgd"', "train.learning_rate=0.5", "train.momentum=0.9", "train.clip=0.0"],
}


LAYOUTS: dict[str, list[str]] = {
    "tp2": layout(2),
    "tp4": layout(4),
    **{f"pp{p} {schedule} M{m}": layout(pipeline=p, schedule=schedule, microbatches=m)
       for schedule, (p, m) in product(("gpipe", "1f1b"), ((2, 1), (2, 2), (2, 3), (4, 2), (4, 4), (4, 6)))},
    "pp2 layers 1+4": layout(pipeline=2, partition=[1, 4], microbatches=4),
    "pp4 layers 2+1+1+1": layout(pipeline=4, partition=[2, 1, 1, 1], microbatches=4),
    **{f"dp{d} zero{z}": layout(data=d, zero=z, microbatches=3) for d, z in product((2, 4), range(4))},
    "dp4 zero1 shard2": layout(data=4, zero=1, shard_degree=2),
    "dp4 zero3 shard2": layout(data=4, zero=3, shard_degree=2, microbatches=2),
    **{f"tp2 pp2 dp2 zero{z}": layout(2, 2, 2, zero=z, microbatches=3) for z in range(4)},
    "tp2 dp2 zero3": layout(2, data=2, zero=3, microbatches=2),
    "tp2 dp3 zero1": layout(2, data=3, zero=1),  # 307 rows cut twice, unevenly
    "tp4 dp2 zero1": layout(4, data=2, zero=1),
    "pp2 dp2 zero2": layout(pipeline=2, data=2, zero=2, microbatches=4),
    "tp2 pp4 zero1": layout(2, 4, microbatches=6),
}


@pytest.mark.parametrize("name", LAYOUTS)
@pytest.mark.parametrize("model", ["gpt2", "llama", "llama-tied"])
def test_layout_equals_one_process(place: Path, reference: Callable[[str, str], Result], model: str, name: str) -> None:
    assert run_engine(job(place, model, LAYOUTS[name])).distance(reference(model, "adamw")) < EXACT


@pytest.mark.parametrize("name", ["tp2", "pp2 1f1b M3", "dp2 zero0", "dp2 zero1", "dp2 zero3", "tp2 pp2 dp2 zero1"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_layout_equals_one_process_with_sgd(
    place: Path, reference: Callable[[str, str], Result], model: str, name: str,
) -> None:
    spec = job(place, model, [*OPTIMIZERS["sgd"], *LAYOUTS[name]])
    assert run_engine(spec).distance(reference(model, "sgd")) < EXACT


@pytest.mark.parametrize("name", ["pp2 1f1b M3", "tp2 pp2 dp2 zero2"])
def test_untied_gpt2_equals_one_process(place: Path, reference: Callable[[str, str], Result], name: str) -> None:
    assert run_engine(job(place, "gpt2-untied", LAYOUTS[name])).distance(reference("gpt2-untied", "adamw")) < EXACT


@pytest.mark.parametrize("name", ["tp2 pp2 dp2 zero1"])
@pytest.mark.parametrize("model", VARIANTS)
def test_variants_of_a_family_are_exact(
    place: Path, reference: Callable[[str, str], Result], model: str, name: str,
) -> None:
    assert run_engine(job(place, model, LAYOUTS[name])).distance(reference(model, "adamw")) < EXACT


@pytest.mark.parametrize("order", ["".join(letters) for letters in permutations("DPT")])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_every_letter_order_is_exact(place: Path, reference: Callable[[str, str], Result], model: str, order: str) -> None:
    spec = job(place, model, [*layout(2, 2, 2, microbatches=3), f'parallel.order="{order}"'])
    assert run_engine(spec).distance(reference(model, "adamw")) < EXACT


@pytest.mark.parametrize("name", ["tp2", "tp4", "pp4 1f1b M6", "dp4 zero2", "tp2 pp2 dp2 zero3"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_dropout_is_equal_on_every_layout(place: Path, model: str, name: str) -> None:
    one = run_engine(job(place, model, ["train.dropout=0.2"]))
    undropped = run_engine(job(place, model))
    assert one.distance(undropped) > WRONG, "dropout must change something"
    assert run_engine(job(place, model, ["train.dropout=0.2", *LAYOUTS[name]])).distance(one) < EXACT


# ---- negative controls: each breaks one thing that exactness rests on, and the same comparison must see it -----------------


def unsummed_tensor_gradient() -> None:
    tensor._Enter.backward = staticmethod(lambda ctx, grad: (grad, None))


def unsummed_tensor_output() -> None:
    tensor._Leave.forward = staticmethod(lambda ctx, x, group: x.view_as(x))


def doubled_loss_scale() -> None:
    run = pipeline.Pipeline.run
    pipeline.Pipeline.run = lambda self, batch, enter, scale, trace=False: run(self, batch, enter, 2 * scale, trace)


def untied_gradients() -> None:
    loop.Trainer._sum_tied_gradients = lambda self: None


def unsummed_replicas() -> None:
    zero.Replicated.reduce = lambda self: None


def averaged_replicas() -> None:
    def shard(self: zero.Sharded, *args: object) -> None:
        original(self, *args)
        for unit in self.units:
            unit.set_gradient_divide_factor(2.0)

    original = zero.Sharded.__init__
    zero.Sharded.__init__ = shard


def mean_of_means() -> None:
    """Each microbatch's own mean, averaged: what many trainers did until 2024."""
    loop.Trainer._count_labels = lambda self, step: self.spec.train.global_batch * self.spec.data.sequence_length


def forgotten_microbatch() -> None:
    backward = pipeline.Pipeline._backward

    def skip(self: pipeline.Pipeline, step: pipeline._Step, action: pipeline.Action) -> None:
        if action.microbatch == 0:
            step.loss_scale, kept = 0.0, step.loss_scale
            backward(self, step, action)
            step.loss_scale = kept
        else:
            backward(self, step, action)

    pipeline.Pipeline._backward = skip


def shifted_positions() -> None:
    loop.Trainer._data_rank = property(lambda self: 0)


def norm_counts_copies() -> None:
    from hpc_mp.train.engine import optimizer
    optimizer._counted = lambda stage, name, parameter: True


CONTROLS: dict[str, tuple[str, Callable[[], None], str]] = {
    "tensor: gradient of a shared input is not summed": ("tp2", unsummed_tensor_gradient, "llama"),
    "tensor: row outputs are not summed": ("tp4", unsummed_tensor_output, "gpt2"),
    "tensor: whole parameters counted twice in the norm": ("tp2", norm_counts_copies, "llama"),
    "pipeline: a microbatch is forgotten": ("pp2 1f1b M3", forgotten_microbatch, "gpt2"),
    "pipeline: gpipe, a microbatch is forgotten": ("pp4 gpipe M6", forgotten_microbatch, "llama"),
    "pipeline: tied gradients are not summed": ("pp2 1f1b M2", untied_gradients, "gpt2"),
    "pipeline: tied gradients are not summed (llama)": ("pp4 1f1b M4", untied_gradients, "llama-tied"),
    "zero 0: replicas are not summed": ("dp2 zero0", unsummed_replicas, "gpt2"),
    "zero 1: replicas are averaged": ("dp2 zero1", averaged_replicas, "gpt2"),
    "zero 2: replicas are averaged": ("dp4 zero2", averaged_replicas, "llama"),
    "zero 3: replicas are averaged": ("dp2 zero3", averaged_replicas, "llama"),
    "replicas train the same samples": ("dp2 zero1", shifted_positions, "gpt2"),
    "ignored labels are counted": ("tp2 pp2 dp2 zero1", mean_of_means, "llama"),
    "gradient scale is doubled": ("tp2 pp2 dp2 zero3", doubled_loss_scale, "gpt2"),
}


@pytest.mark.parametrize("control", CONTROLS)
def test_a_broken_layout_is_seen(place: Path, reference: Callable[[str, str], Result], control: str) -> None:
    name, sabotage, model = CONTROLS[control]
    assert run_engine(job(place, model, LAYOUTS[name]), before=sabotage).distance(reference(model, "adamw")) > WRONG


# ---- what layouts hold, and bf16 -------------------------------------------------------------------------------------


@pytest.mark.parametrize("name", ["dp2 zero0", "dp4 zero1", "dp2 zero3", "dp4 zero1 shard2", "tp2 pp2 dp2 zero2", "tp4"])
@pytest.mark.parametrize("model", ["gpt2", "llama"])
def test_the_predicted_state_is_what_ranks_hold(place: Path, model: str, name: str) -> None:
    spec = job(place, model, LAYOUTS[name])
    run = start(spec)
    run_engine(spec, run=run)
    shape, costs = read_shape(spec), layer_costs(read_shape(spec), spec.data.sequence_length)
    layers = stage_layers("auto", costs.blocks, spec.parallel.pipeline, costs.embedding, costs.head)
    predicted = state_bytes(shape, spec, layers)
    first_of_shards = [line for line in read_lines(run.ranks) if line["dp"] == 0]
    assert len(first_of_shards) == spec.parallel.tensor * spec.parallel.pipeline
    for line in first_of_shards:
        held = read_json(run.trace(line["rank"]))["memory"]
        assert held["optimizer"] == predicted[line["pp"], line["tp"]].optimizer
        assert held["parameters"] * 2 == held["optimizer"]  # AdamW: two numbers per parameter


@pytest.mark.parametrize("name", ["tp2", "pp2 1f1b M3", "dp2 zero0", "dp2 zero3", "tp2 pp2 dp2 zero1"])
@pytest.mark.parametrize("model", ["gpt2", "llama-tied"])
def test_bf16_computes_in_bf16_over_fp32_masters(place: Path, model: str, name: str) -> None:
    whole = run_engine(job(place, model, ['train.precision="fp32"']))
    spec = job(place, model, ['train.precision="bf16"', *LAYOUTS[name]])
    run = start(spec)
    distance = run_engine(spec, run=run).distance(whole)
    assert 1e-5 < distance < 3e-2, "bf16 keeps 8 bits: near fp32, and not equal"
    newest, _ = newest_complete(run.checkpoints)
    assert newest is not None
    for path in newest.glob("*.safetensors"):
        with safe_open(path, "pt") as file:
            assert {file.get_slice(key).get_dtype() for key in file.keys()} == {"F32"}  # noqa: SIM118
