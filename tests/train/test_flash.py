"""Fused blocks of attention: merged over blocks of keys they are the attention of all keys, forward and backward."""

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from hpc_mp.train.parallel import flash
from hpc_mp.train.parallel.ring_attention import _merge

BATCH, HEADS, TOKENS, SIZE = 2, 2, 12, 4


@pytest.mark.parametrize("groups", [1, 3])
@given(st.integers(1, TOKENS - 1))
def test_blocks_of_keys_merge_into_all_of_them(groups: int, cut: int) -> None:
    """Queries behind ``cut`` see the keys before it as a whole block, and their own ones causally."""
    generator = torch.Generator().manual_seed(cut)
    query, key, value, outer = (torch.randn(shape, generator=generator, dtype=torch.float64) for shape in (
        (BATCH, HEADS, groups, TOKENS, SIZE), *[(BATCH, HEADS, TOKENS, SIZE)] * 2, (BATCH, HEADS, groups, TOKENS, SIZE)))
    leaves = [tensor.clone().requires_grad_() for tensor in (query, key, value)]
    scores = leaves[0] @ leaves[1].unsqueeze(2).transpose(-1, -2) * 0.5
    hidden = torch.ones(TOKENS, TOKENS, dtype=torch.bool).triu(1)
    expected = scores.masked_fill(hidden, -torch.inf).softmax(-1) @ leaves[2].unsqueeze(2)
    gradients = torch.autograd.grad(expected, leaves, outer)

    late, early = slice(cut, TOKENS), slice(0, cut)
    output, total = torch.zeros_like(query), torch.full(query.shape[:-1], -torch.inf, dtype=torch.float64)
    blocks = [(early, early, True), (late, late, True), (late, early, False)]
    for rows, columns, causal in blocks:
        part, log_z = flash.attend(query[..., rows, :], key[..., columns, :], value[..., columns, :], causal, 0.5)
        _merge(output[..., rows, :], total[..., rows], part, log_z)
    sums = [torch.zeros_like(tensor) for tensor in (query, key, value)]
    for rows, columns, causal in blocks:
        found = flash.slopes(query[..., rows, :], key[..., columns, :], value[..., columns, :], outer[..., rows, :],
                             output[..., rows, :], total[..., rows], causal, 0.5)
        for total_gradient, part, where in zip(sums, found, (rows, columns, columns), strict=True):
            total_gradient[..., where, :] += part
    torch.testing.assert_close(output, expected, rtol=1e-12, atol=1e-12)
    for found, gradient in zip(sums, gradients, strict=True):
        torch.testing.assert_close(found, gradient, rtol=1e-11, atol=1e-11)


@pytest.mark.parametrize(("dtype", "size", "computed"), [
    (torch.float64, 4, True), (torch.bfloat16, 6, True), (torch.float32, 2048, False)])
def test_which_blocks_the_host_has_a_kernel_for(dtype: torch.dtype, size: int, computed: bool) -> None:
    assert flash.computes(torch.empty(1, 1, 1, 1, size, dtype=dtype)) == computed


@pytest.mark.parametrize(("dtype", "size", "recent", "computed"), [
    (torch.float64, 64, True, False), (torch.bfloat16, 64, True, True), (torch.bfloat16, 60, True, False),
    (torch.float16, 512, True, False), (torch.float16, 64, False, False)])  # the last: a V100
def test_which_blocks_a_gpu_has_a_kernel_for(dtype: torch.dtype, size: int, recent: bool, computed: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(flash, "_kernel", lambda query: flash.ON_GPU)
    monkeypatch.setattr(flash, "since_a100", lambda device: recent)
    assert flash.computes(torch.empty(1, 1, 1, 1, size, dtype=dtype)) == computed
