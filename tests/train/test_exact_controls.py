"""Negative controls of exactness: each breaks one thing that it rests on, and the same comparison must see it."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
from exact import LAYOUTS, WRONG, Reference
from layouts import job, run_engine

from hpc_mp.train.engine import pipeline, tensor, zero
from hpc_mp.train.rank import trainer as loop


def unsummed_tensor_gradient() -> None:
    tensor._Enter.backward = staticmethod(lambda ctx, grad: (grad, None))


def unsummed_tensor_output() -> None:
    tensor._Leave.forward = staticmethod(lambda ctx, x, group: x.view_as(x))


def doubled_loss_scale() -> None:
    run = pipeline.Pipeline.run
    pipeline.Pipeline.run = lambda self, batch, enter, scale, trace=False: run(self, batch, enter, lambda: 2 * scale(), trace)


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
    loop._LabelCount.all = lambda self: 24 * 24  # of the global batch, all that there are


def forgotten_microbatch() -> None:
    backward = pipeline.Pipeline._backward

    def skip(self: pipeline.Pipeline, step: pipeline._Step, action: pipeline.Action) -> None:
        if action.microbatch == 0:
            step.loss_scale, kept = (lambda: 0.0), step.loss_scale
            backward(self, step, action)
            step.loss_scale = kept
        else:
            backward(self, step, action)

    pipeline.Pipeline._backward = skip


def shifted_positions() -> None:
    loop.Trainer._data_rank = property(lambda self: 0)


def norm_counts_copies() -> None:
    from hpc_mp.train.engine import optimizer
    optimizer._saved = lambda stage, name: True


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
def test_a_broken_layout_is_seen(place: Path, reference: Reference, control: str) -> None:
    name, sabotage, model = CONTROLS[control]
    assert run_engine(job(place, model, LAYOUTS[name]), before=sabotage).distance(reference(model)) > WRONG
