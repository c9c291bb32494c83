"""The largest memory that pieces of a step hold at once, counted without a device: losses, ring attention, and attention of
documents.

    python benchmarks/live_bytes.py [--tokens 131072] [--ranks 8] [--packed 32768]

Tensors are torch's fake ones, as in a dry run. ``inputs`` exist before and after a piece; ``peak`` is what it holds besides them
at most, forward and backward. Each piece stands beside the way without it: a loss with the logits of all tokens, ring
attention by plain products, documents with one mask of sequence x sequence. The sizes are those of Llama 3 8B.
"""

from collections import defaultdict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any
from unittest.mock import patch

import click
import torch
import torch.distributed as dist
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from hpc_mp.train.dry_run.recorder import Recorder
from hpc_mp.train.model import vocabulary
from hpc_mp.train.model.attention_table import FUNCTIONS, FUSED
from hpc_mp.train.parallel import flash, masks
from hpc_mp.train.parallel.groups import Axis
from hpc_mp.train.parallel.projection import TensorAxis, WeightGradients
from hpc_mp.train.parallel.ring_attention import AttentionRing, ring_attention

HIDDEN, VOCABULARY, HEADS, KV_HEADS, HEAD = 4096, 128_256, 32, 8, 128


class Head:
    """A head whose weight gradient is kept in fp32, as the engine's is."""

    trained = True

    def __init__(self) -> None:
        self.tensor = TensorAxis(Axis(), (), WeightGradients())
        self.weight = torch.empty(VOCABULARY, HIDDEN, dtype=torch.bfloat16)
        self.gradient = torch.empty(VOCABULARY, HIDDEN)

    def product(self, rows: Tensor) -> Tensor:
        return rows @ self.weight.t()

    def input_gradient(self, slopes: Tensor) -> Tensor:
        return slopes @ self.weight

    def add_weight_gradient(self, rows: Tensor, slopes: Tensor, more: bool = False) -> None:
        """Add in place, as a GPU does."""


def peak_of(make: Callable[[], Sequence[Tensor]], piece: Callable[..., Tensor]) -> tuple[int, int]:
    """Return the bytes of a piece's inputs, and the largest number besides them."""
    with FakeTensorMode(), Recorder(defaultdict(str)) as recorder:
        inputs = make()
        before = recorder.live
        recorder.at("piece", "piece")
        piece(*inputs).sum().backward()
        return before, recorder.peaks["piece"].bytes - before


def loss(tokens: int, chunk: int) -> tuple[int, int]:
    """The loss of a microbatch, with so many logits at once."""
    heads: list[Head] = []

    def make() -> Sequence[Tensor]:
        heads.append(Head())
        return torch.empty(1, tokens, HIDDEN, dtype=torch.bfloat16, requires_grad=True), torch.zeros(1, tokens, dtype=torch.int64)

    def piece(hidden: Tensor, labels: Tensor) -> Tensor:
        with patch.object(vocabulary, "CHUNK", chunk):
            objective = vocabulary.NextToken(heads[0], VOCABULARY, heads[0].tensor, None, False)  # type: ignore[arg-type]
        return objective(hidden, {"labels": labels}, lambda values: values, torch.ones(()))[0]

    return peak_of(make, piece)


def ring(tokens: int, ranks: int, fused: bool) -> tuple[int, int]:
    """The attention of one layer on a rank with its part of the tokens."""
    own = tokens // ranks
    axis = Axis(ranks, 0, dist.group.WORLD, False, "context")

    def positions(rank: int) -> Tensor:
        return torch.cat([torch.arange(own // 2), tokens - own // 2 + torch.arange(own // 2)])

    def make() -> Sequence[Tensor]:
        counts = HEADS, KV_HEADS, KV_HEADS
        return [torch.empty(1, heads, own, HEAD, dtype=torch.bfloat16, requires_grad=True) for heads in counts]

    def piece(*inputs: Tensor) -> Tensor:
        site: Any = SimpleNamespace(p=0.0)
        return ring_attention(*inputs, AttentionRing(axis, positions, HEAD**-0.5, tokens, site, None, None, None))

    with patch.object(flash, "computes", lambda query: fused):
        return peak_of(make, piece)


def documents(tokens: int, queries: int, fused: bool) -> tuple[int, int]:
    """The attention of one layer with a packed sample, in blocks of queries or by the kernel for sequences of several lengths."""
    def make() -> Sequence[Tensor]:
        return [torch.empty(1, heads, tokens, HEAD, dtype=torch.bfloat16, requires_grad=True)
                for heads in (HEADS, KV_HEADS, KV_HEADS)]

    def piece(*inputs: Tensor) -> Tensor:
        visible = masks.Visible(torch.empty(1, tokens, dtype=torch.int64), torch.empty(9, dtype=torch.int32), None, True)
        module: Any = SimpleNamespace(num_key_value_groups=HEADS // KV_HEADS, is_causal=True)
        output, _ = FUNCTIONS[FUSED](module, *inputs, visible, scaling=HEAD**-0.5)
        return output

    with patch.object(masks, "QUERIES", queries), patch.object(flash, "computes_documents", lambda query: fused):
        return peak_of(make, piece)


@click.command()
@click.option("--tokens", default=131_072, help="of a sample of the ring")
@click.option("--ranks", default=8, help="of the ring")
@click.option("--microbatch", default=8192, help="tokens of a loss")
@click.option("--packed", default=32_768, help="tokens of a sample of documents")
def main(tokens: int, ranks: int, microbatch: int, packed: int) -> None:
    dist.init_process_group("fake", rank=0, world_size=ranks)
    rows = {f"loss of {microbatch:,} tokens, all logits": loss(microbatch, microbatch * VOCABULARY),
            f"loss of {microbatch:,} tokens, in chunks": loss(microbatch, vocabulary.CHUNK),
            f"ring of {ranks}, {tokens:,} tokens, plain products": ring(tokens, ranks, False),
            f"ring of {ranks}, {tokens:,} tokens, fused": ring(tokens, ranks, True),
            f"documents of {packed:,} tokens, one mask": documents(packed, packed, False),
            f"documents of {packed:,} tokens, blocks of queries": documents(packed, masks.QUERIES, False),
            f"documents of {packed:,} tokens, fused": documents(packed, packed, True)}
    for name, (inputs, peak) in rows.items():
        print(f"{name:<50}inputs {inputs / 1e9:6.2f} GB, peak {peak / 1e9:6.2f} GB")
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
