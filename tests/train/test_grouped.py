"""Products of rows that lie group by group: equal to those of single groups, and without a question to the device."""

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_mp.train.parallel.experts import dispatch
from hpc_mp.train.parallel.grouped import add_grouped_outer, grouped_product

ROUNDING = {torch.float64: 1e-13, torch.float32: 1e-5, torch.bfloat16: 3e-2}
COUNTS = st.lists(st.integers(0, 5), min_size=1, max_size=5)


class Questions(TorchDispatchMode):
    """Counts requests of the host for values."""

    count = 0

    def __enter__(self) -> "Questions":
        self.tolist = torch.Tensor.tolist
        asked = self._asked
        torch.Tensor.tolist = lambda values: asked(values)  # type: ignore[method-assign]
        super().__enter__()
        return self

    def __exit__(self, *error: Any) -> None:
        torch.Tensor.tolist = self.tolist  # type: ignore[method-assign]
        super().__exit__(*error)

    def _asked(self, values: torch.Tensor) -> Any:
        self.count += 1
        return self.tolist(values)

    def __torch_dispatch__(self, function: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.count += function is torch.ops.aten._local_scalar_dense.default
        return function(*args, **kwargs or {})


def ends_of(counts: list[int]) -> torch.Tensor:
    return torch.tensor(counts).cumsum(0).int()


@given(COUNTS, st.integers(0, 3), st.sampled_from([8, 16, 5]), st.sampled_from([8, 3]), st.sampled_from(list(ROUNDING)),
       st.booleans())
def test_products_equal_those_of_single_groups(counts: list[int], behind: int, n: int, m: int, dtype: torch.dtype,
                                               turned: bool) -> None:
    generator = torch.Generator().manual_seed(n * m + len(counts))
    rows, other = (torch.randn(sum(counts) + behind, width, generator=generator).to(dtype) for width in (n, m))
    matrices = torch.randn(len(counts), *((m, n) if turned else (n, m)), generator=generator).to(dtype)
    matrices = matrices.transpose(1, 2) if turned else matrices
    target = torch.ones(len(counts), n, m, dtype=torch.promote_types(dtype, torch.float32))
    product = grouped_product(rows, matrices, ends_of(counts))
    add_grouped_outer(target, rows, other, ends_of(counts))
    begin = 0
    for group, count in enumerate(counts):
        part = slice(begin, begin + count)
        torch.testing.assert_close(product[part], rows[part] @ matrices[group], rtol=ROUNDING[dtype], atol=ROUNDING[dtype])
        outer = 1 + (rows[part].t() @ other[part]).to(target.dtype)
        torch.testing.assert_close(target[group], outer, rtol=ROUNDING[dtype], atol=5 * ROUNDING[dtype])
        begin += count


@pytest.mark.parametrize(("n", "dtype", "asks"), [
    (16, torch.bfloat16, False), (16, torch.float32, False), (6, torch.bfloat16, True), (16, torch.float64, True)])
def test_one_kernel_asks_for_no_end(n: int, dtype: torch.dtype, asks: bool) -> None:
    """Rows that begin at multiples of 16 bytes; other ones are computed group by group."""
    rows, matrices = torch.ones(7, n, dtype=dtype), torch.ones(3, n, 8, dtype=dtype)
    with Questions() as questions:
        grouped_product(rows, matrices, ends_of([2, 1, 4]))
        add_grouped_outer(torch.zeros(3, n, 8, dtype=dtype), rows, torch.ones(7, 8, dtype=dtype), ends_of([2, 1, 4]))
    assert (questions.count > 0) == asks


def test_a_matrix_that_begins_elsewhere_is_multiplied_by_itself() -> None:
    """A weight is a view of a flat parameter, and torch's kernel takes addresses of multiples of 16 bytes alone."""
    flat = torch.ones(1 + 3 * 16 * 8, dtype=torch.bfloat16)
    with Questions() as questions:
        product = grouped_product(torch.ones(4, 16, dtype=torch.bfloat16), flat[1:].view(3, 16, 8), ends_of([1, 2, 1]))
    assert questions.count > 0 and product.eq(16).all()


def test_choices_are_assigned_without_a_question_and_dropped_ones_give_nothing() -> None:
    """What the products leave behind the last end has no meaning, and must not reach a token."""
    index = torch.tensor([[0, 2], [2, 3], [0, 3]])  # of 3 experts: two choices have been dropped
    with Questions() as questions:
        where = dispatch(index, 3, limit=2)
    assert questions.count == 0
    assert where.ends.tolist() == [2, 2, 4] and where.order[:4].tolist() == [0, 4, 1, 2] and len(where.order) == 6
    rows = torch.full((6, 8), torch.nan)
    rows[:4] = 1.0
    tokens = where.tokens(rows.requires_grad_(), torch.full((3, 2), 0.5))
    assert tokens[:, 0].tolist() == [1.0, 0.5, 0.5]
    tokens.sum().backward()
    assert rows.grad is not None and rows.grad[:4].eq(0.5).all()
