"""Attention of documents and windows without an array of sequence x sequence equals attention with a mask."""

from types import SimpleNamespace
from typing import Any

import kernels
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from hpc_mp.train.model import attention_table
from hpc_mp.train.parallel import flash, masks
from hpc_mp.train.parallel.masks import Visible, begins_of, first_seen, offsets_of

LENGTH, SIZE = 13, 4
SAMPLES = st.lists(st.sets(st.integers(1, LENGTH), max_size=5), min_size=1, max_size=3)


def documents_of(samples: list[set[int]]) -> Tensor:
    widest = 1 + max(map(len, samples))
    return torch.tensor([[0, *sorted(sample), *[LENGTH] * (widest - 1 - len(sample))] for sample in samples])


def visible_of(documents: Tensor, window: int | None, causal: bool) -> Visible:
    positions = torch.arange(LENGTH)
    first = first_seen(begins_of(documents, positions), window if causal else None, positions)
    assert first is not None
    return Visible(first, offsets_of(documents, len(documents), LENGTH, positions.device), window, causal)


def sees(samples: list[set[int]], window: int | None, causal: bool) -> Tensor:
    """Say of each pair of tokens whether the first sees the second, (samples, LENGTH, LENGTH), token by token."""
    def one(sample: set[int], token: int, other: int) -> bool:
        same = not any(min(token, other) < begin <= max(token, other) for begin in sample)
        return same and (not causal or other <= token) and (window is None or abs(token - other) < window)

    return torch.tensor([[[one(sample, i, j) for j in range(LENGTH)] for i in range(LENGTH)] for sample in samples])


@given(SAMPLES, st.none() | st.integers(1, LENGTH), st.booleans())
def test_a_mask_hides_other_documents_and_what_is_outside_of_a_window(samples: list[set[int]], window: int | None,
                                                                      causal: bool) -> None:
    mask = visible_of(documents_of(samples), window, causal).mask(torch.float32)
    assert torch.equal(mask[:, 0] == 0, sees(samples, window, causal))


def states(samples: int, groups: int) -> list[Tensor]:
    generator = torch.Generator().manual_seed(samples)
    return [torch.randn(samples, heads, LENGTH, SIZE, generator=generator, dtype=torch.float64, requires_grad=True)
            for heads in (2 * groups, 2, 2)]


def attend(tensors: list[Tensor], visible: Visible) -> list[Tensor]:
    """Return the output and the gradients."""
    module: Any = SimpleNamespace(num_key_value_groups=tensors[0].shape[1] // tensors[1].shape[1], is_causal=visible.causal)
    output, _ = attention_table.FUNCTIONS[attention_table.FUSED](module, *tensors, visible, scaling=0.4)
    outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return [output, *torch.autograd.grad(output, tensors, outer)]


def by_mask(tensors: list[Tensor], seen: Tensor) -> list[Tensor]:
    query, key, value = tensors
    groups = query.shape[1] // key.shape[1]
    scores = query @ key.repeat_interleave(groups, 1).transpose(2, 3) * 0.4
    weights = scores.masked_fill(~seen.unsqueeze(1), -torch.inf).softmax(-1)
    output = (weights @ value.repeat_interleave(groups, 1)).transpose(1, 2)
    outer = torch.randn(output.shape, generator=torch.Generator().manual_seed(1), dtype=output.dtype)
    return [output, *torch.autograd.grad(output, tensors, outer)]


@pytest.mark.parametrize("way", ["blocks", "kernel"])
@given(SAMPLES, st.none() | st.integers(1, LENGTH), st.booleans(), st.integers(1, 2), st.integers(1, LENGTH))
def test_attention_equals_that_with_a_mask(way: str, samples: list[set[int]], window: int | None, causal: bool, groups: int,
                                           queries: int) -> None:
    """In blocks of any number of queries; and by the kernel of a GPU, as it is called, with plain products."""
    tensors, visible = states(len(samples), groups), visible_of(documents_of(samples), window, causal)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(masks, "QUERIES", queries)
        patch.setattr(flash, "ATEN", kernels)
        patch.setattr(flash, "computes_documents", lambda query: way == "kernel")
        results = attend(tensors, visible)
    for result, expected in zip(results, by_mask(tensors, sees(samples, window, causal)), strict=True):
        torch.testing.assert_close(result, expected, rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("way", ["blocks", "kernel"])
def test_a_window_that_is_longer_by_one_is_seen(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A negative control of the test above."""
    monkeypatch.setattr(masks, "QUERIES", 5)
    monkeypatch.setattr(flash, "ATEN", kernels)
    monkeypatch.setattr(flash, "computes_documents", lambda query: way == "kernel")
    samples: list[set[int]] = [{6}, set()]
    tensors, visible = states(2, 1), visible_of(documents_of(samples), 5, True)
    output, *_ = attend(tensors, visible)
    assert (output - by_mask(tensors, sees(samples, 4, True))[0]).abs().max() > 1e-3


def test_the_kernel_of_a_gpu_is_for_formats_of_16_bits() -> None:
    assert not flash.computes_documents(torch.empty(1, 1, 8, 64, dtype=torch.bfloat16)), "on a CPU there is none"
