"""Negative controls of exactness: each breaks one thing that it rests on, and the same comparison must see it."""

from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from engines import run_engine
from exact import LAYOUTS, ONE_STEP, WRONG, Engine, Plain, cases
from layouts import job
from planting import frequencies_of_own_positions, planted, wrapped

from hpc_mp.layout import schedule_of
from hpc_mp.train.model import transformers_stage
from hpc_mp.train.optimizer import optimizer
from hpc_mp.train.parallel import collectives, context, data_axis, dropout, experts, gradients, groups, projection, ring_attention
from hpc_mp.train.pipeline import pipeline
from hpc_mp.train.step import engine


def nothing_sent(*_: object) -> collectives.Running:
    """A reduction that is over at once."""
    return collectives.Running()


def own_axis(*_: object) -> groups.Axis:
    return groups.Axis()


# Every tensor rank trains its router with its own share of the experts' outputs, or its key-value heads with its own queries.
own_share_alone = wrapped(groups.Groups, "sharing", lambda sharing: own_axis)
# The first of the ranks with the same key-value heads gets zeros from the others.
one_share_left_out = wrapped(gradients, "all_reduce", lambda reduce: lambda values, axis: reduce(
    values.mul_(axis.name != "kv" or axis.rank == 0), axis))
# Two experts get each other's tokens, and their outputs come back to the right ones.
expert_of_another = wrapped(experts, "dispatch", lambda dispatch: lambda index, *more: dispatch(
    torch.where(index < 2, 1 - index, index), *more))
forgotten_choice = wrapped(experts.Dispatch, "tokens", lambda tokens: lambda self, rows, weights: tokens(
    self, rows, weights.mean(1, keepdim=True).expand_as(weights)))
unseen_window = wrapped(transformers_stage, "first_seen", lambda seen: lambda begins, window, positions: begins)
window_off_by_one = wrapped(transformers_stage, "first_seen", lambda seen: lambda begins, window, positions: seen(
    begins, window + 1, positions))
# Every tensor rank drops attention weights as if its heads were the first ones.
cut_heads_all_alike = wrapped(dropout.HashDropout, "__init__", lambda init: lambda self, p, site, clock, rows, *calls: init(
    self, p, site, clock, rows - rows.min() if site.startswith("attention.") else rows, *calls))
unsummed_tensor_gradient = wrapped(projection.TensorAxis, "_input_gradient", lambda summed: lambda self, gradient: gradient)
unsummed_tensor_output = wrapped(projection, "all_reduce", lambda reduce: nothing_sent)
# Norms and row biases keep the gradient of this rank's tokens.
unsummed_shares_of_tokens = wrapped(groups.Groups, "sharing", lambda sharing: lambda self, slot: (
    sharing(self, slot) if slot.cut else groups.Axis()))
# A W forgets what its I has put off.
lost_weight_gradients = wrapped(projection.WeightGradients, "take", lambda take: lambda self: (
    self._waiting.clear(), projection.WeightGradients())[1])
doubled_loss_scale = wrapped(pipeline.Pipeline, "train", lambda train: lambda self, share, scale, *rest: train(
    self, share, 2 * scale, *rest))
untied_gradients = wrapped(data_axis, "all_reduce", lambda reduce: nothing_sent)
unsummed_replicas = wrapped(gradients, "all_reduce", lambda reduce: nothing_sent)
unsummed_shards = wrapped(gradients, "reduce_scatter", lambda reduce: nothing_sent)
# ZeRO-3 forgets to give whole parameters back, and so never asks for new ones.
kept_gathered = wrapped(data_axis.Unit, "release", lambda release: lambda self: None)
# Gradients begin anew with every backward whose REDUCE comes.
forgotten_sums = wrapped(gradients.UnitGradient, "announce", lambda announce: lambda self: (
    self.held.zero_(), announce(self))[1])
# Each microbatch's own mean, averaged, as many trainers did until 2024: of the global batch, all labels that there are.
mean_of_means = wrapped(engine, "label_count", lambda count: lambda own, mine, device: count(
    24 * 24, replace(mine, context=groups.Axis(), shard=groups.Axis(), replicate=groups.Axis()), device))
shifted_positions = wrapped(groups.Groups, "data_rank", lambda slot: property(lambda self: 0, lambda self, value: None))
# Each rank of a ring leaves the last part out.
forgotten_block = wrapped(ring_attention, "_blocks", lambda blocks: lambda ring, turn, *sizes: (
    iter(()) if turn == ring.axis.size - 1 else blocks(ring, turn, *sizes)))
one_way_exchange = wrapped(context, "with_backward", lambda function: lambda forward, _, x: function(
    forward, lambda gradient: gradient, x))
# Every context rank counts the labels of whole samples.
labels_counted_by_all = wrapped(engine, "label_count", lambda count: lambda own, mine, device: count(
    own, replace(mine, context=groups.Axis()), device))


def positions_from_zero() -> None:
    """Take the tokens of every context rank for the first ones of their sample."""
    first = property(lambda self: torch.arange(len(self.context.positions)), lambda self, value: None)
    transformers_stage.TransformersStage.positions = first


@planted(data_axis.DataAxis, "finish")
def averaged_shards(finish: Any, axis: data_axis.DataAxis) -> None:
    finish(axis)
    for unit in axis.trained.values():
        unit.gradient.part.div_(unit.shard.size)


def stale_parameters() -> None:
    """Ranks compute on with the parameters that others have updated since."""
    calls: list[data_axis.Unit] = []

    @planted(data_axis.Unit, "publish")
    def sometimes(publish: Any, unit: data_axis.Unit) -> None:
        calls.append(unit)
        if calls.count(unit) != 2:
            publish(unit)

    sometimes()


@planted(data_axis.DataAxis, "begin")
def early_reduction(begin: Any, axis: data_axis.DataAxis) -> None:
    """A unit that two stages of a rank have is summed after the first of them."""
    begin(axis)
    for unit in axis.trained.values():
        unit.gradient._left = 1


def early_sums() -> None:
    """Whole gradients are summed after every microbatch, though those before are still in them."""
    complete = schedule_of.build
    schedule_of.build = lambda name, pipeline, microbatches, virtual, _: complete(name, pipeline, microbatches, virtual, "each")
    gradients.UnitGradient.reduce = lambda self: self._reduce()
    original = gradients.UnitGradient.__init__
    gradients.UnitGradient.__init__ = lambda self, layout, groups, kept, *rest: original(self, layout, groups, True, *rest)


@planted(pipeline.Pipeline, "__init__")
def forgotten_microbatch(original: Any, line: pipeline.Pipeline, *given: Any) -> None:
    original(line, *given)

    def forgetful(perform: Any, step: pipeline._Step, action: pipeline.Action) -> None:
        kept = step.scale
        if action.microbatch == 0 and kept is not None:
            step.scale = torch.zeros_like(kept)
        perform(step, action)
        step.scale = kept

    line.perform = {kind: partial(forgetful, perform) for kind, perform in line.perform.items()}


@planted(optimizer.Optimizer, "__init__")
def norm_counts_copies(original: Any, made: optimizer.Optimizer, *given: Any) -> None:
    original(made, *given)
    made.weights.fill_(1.0)


Control = tuple[str, Callable[[], None], str]  # a layout, what is broken, a model
QUICK: dict[str, Control] = {  # one of each kind in ``make test``; the others are proofs
    "tensor: gradient of a shared input is not summed": ("tp2", unsummed_tensor_gradient, "llama"),
    "tensor: whole parameters counted twice in the norm": ("tp2", norm_counts_copies, "llama"),
    "tensor: shared key-value heads are not summed": ("tp4", own_share_alone, "llama with two key-value heads"),
    "tensor: a share of a key-value head's gradient is left out": ("tp3", one_share_left_out, "llama with two key-value heads"),
    "sequence: norms are not summed": ("sp2", unsummed_shares_of_tokens, "llama"),
    "experts: the router's gradient is not summed": ("tp2", own_share_alone, "mixtral"),
    "window: one token more is seen": ("dp2 zero3", window_off_by_one, "mixtral"),
    "pipeline: a microbatch is forgotten": ("pp2 1f1b M3", forgotten_microbatch, "gpt2"),
    "pipeline: tied gradients are not summed": ("pp2 1f1b M2", untied_gradients, "gpt2"),
    "zero 0: replicas are not summed": ("dp2 zero0", unsummed_replicas, "gpt2"),
    "pipeline: weight gradients put off are lost": ("pp2 zero_bubble M3", lost_weight_gradients, "llama"),
    "zero 1: parameters are not handed on": ("dp2 zero1", stale_parameters, "gpt2"),
    "zero 3 once: the last microbatch alone is summed": ("dp2 zero3 once", forgotten_sums, "llama"),
    "zero 2: shards are not summed": ("dp4 zero2", unsummed_shards, "llama"),
    "zero 3: parameters are not gathered anew": ("dp2 zero3", kept_gathered, "llama"),
    "replicas train the same samples": ("dp2 zero1", shifted_positions, "gpt2"),
    "context: a ring forgets a block": ("cp4 ring", forgotten_block, "llama-tied"),
    "context: labels are counted by every rank": ("dp2 cp2 zero1 shard2", labels_counted_by_all, "llama-tied"),
    "context: frequencies of a rank's own positions (ring)": ("cp2 ring", frequencies_of_own_positions, "llama with longrope"),
    "ignored labels are counted": ("tp2 pp2 dp2 zero1", mean_of_means, "llama"),
}
CONTROLS: dict[str, Control] = QUICK | {
    "tensor: row outputs are not summed": ("tp4", unsummed_tensor_output, "gpt2"),
    "sequence: norms and row biases are not summed (zero 3)": ("sp2 dp2 zero3", unsummed_shares_of_tokens, "gpt2"),
    "experts: two are taken for each other": ("dp2 zero3", expert_of_another, "mixtral"),
    "experts: choices count alike": ("dp2 zero3", forgotten_choice, "mixtral"),
    "window: all earlier tokens are seen": ("pp2 layers 1+4", unseen_window, "mixtral"),
    "pipeline: gpipe, a microbatch is forgotten": ("pp4 gpipe M6", forgotten_microbatch, "llama"),
    "pipeline: tied gradients are not summed (llama)": ("pp4 1f1b M4", untied_gradients, "llama-tied"),
    "stages without layers: tied gradients are not summed": ("pp3 dp2 zero1 layers 0+5+0", untied_gradients, "gpt2"),
    "stages without layers: parameters are not gathered anew": ("pp3 dp2 zero3 layers 0+5+0", kept_gathered, "llama"),
    "stages without layers: shards are averaged": ("pp2 dp2 zero3 zero_bubble_v layers 0+2+3+0", averaged_shards, "llama"),
    "pipeline: a tied weight of two stages is summed too early": ("tp2 pp2 dp2 zero1 zero_bubble_v", early_reduction, "gpt2"),
    "zero 1: shards are averaged": ("dp2 zero1", averaged_shards, "gpt2"),
    "zero 2 once: each microbatch's sums are added up": ("pp2 dp2 zero2 zero_bubble once", early_sums, "llama"),
    "zero 3: shards are averaged": ("dp2 zero3", averaged_shards, "llama"),
    "shard degree: replicas are not summed": ("dp4 zero1 shard2", unsummed_replicas, "gpt2"),
    "context: gradients are not exchanged": ("cp2 ulysses", one_way_exchange, "gpt2"),
    "context: positions begin anew on every rank": ("cp2 ulysses", positions_from_zero, "gpt2"),
    "context: positions of a ring are not those of its chunks": ("cp2 ring", positions_from_zero, "qwen2"),
    "context: frequencies of a rank's own positions": ("cp2 ulysses", frequencies_of_own_positions, "mixtral with longrope"),
    "gradient scale is doubled": ("tp2 pp2 dp2 zero3", doubled_loss_scale, "gpt2"),
}
LATER = (stale_parameters, kept_gathered)  # a step after the first shows them


@pytest.mark.parametrize("control", cases(CONTROLS, QUICK))
def test_a_broken_layout_is_seen(place: Path, plain: Plain, control: str) -> None:
    name, sabotage, model = CONTROLS[control]
    steps = [] if sabotage in LATER else [ONE_STEP]
    broken = run_engine(job(place, model, [*LAYOUTS[name], *steps]), before=sabotage)
    assert broken.distance(plain(job(place, model, steps))) > WRONG


@pytest.mark.parametrize("name", cases(("tp2", "tp3"), ("tp3",)))
def test_masks_of_other_heads_are_seen(place: Path, engine: Engine, name: str) -> None:
    one = engine("gptj", "train.dropout=0.2", ONE_STEP)
    spec = job(place, "gptj", ["train.dropout=0.2", *LAYOUTS[name], ONE_STEP])
    assert run_engine(spec, before=cut_heads_all_alike).distance(one) > WRONG
