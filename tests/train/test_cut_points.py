"""A module written in one forward with places to cut, and an nn.Sequential, equal themselves as plain torch runs them."""

import pytest
import torch
from exact import EXACT, cases
from lists import SEED, WIDTH, WORDS, Block, Flat, Join, Reference, Split, Words, distance, lay, listed, steps
from torch import Tensor, nn

from hpc_mp.train.engine.cut_points import CutPoint, layers_of
from hpc_mp.train.engine.dropout import DropoutClock
from hpc_mp.train.engine.listed_stage import ListedModel


class Written(nn.Module):
    """The same kind of model in one forward, with places to cut."""

    def __init__(self) -> None:
        super().__init__()
        self.words, self.split, self.block, self.join, self.head = nn.Embedding(WORDS, WIDTH), Split(), Block(), Join(), Words()
        self.head.weight = self.words.weight
        self.cut = CutPoint()

    def forward(self, ids: Tensor, weight: Tensor) -> tuple[Tensor, Tensor]:
        hidden, skip = self.split(self.cut(self.words(ids)))
        hidden = self.block(self.cut(hidden + 1), weight)
        hidden, extra = self.join(self.cut(hidden), skip)
        return self.head(self.cut(hidden * 2)), extra



def written() -> Written:
    torch.manual_seed(5)
    return Written()


def parts(samples: int) -> ListedModel:
    plain, made = listed(samples), layers_of(written())
    return ListedModel(made.layers, plain.objective, SEED, made.outputs, plain.batch)


def alone() -> Reference:
    """The module itself, in one process."""
    module, clock = written().double(), DropoutClock(SEED)
    for path, site in {"split": "part1.split.drop", "block": "part2.block.drop"}.items():
        inner = module.get_submodule(path)
        setattr(inner, "drop", Flat(inner.get_submodule("drop").p, site, clock, torch.empty(0)))  # noqa: B010
    owners = {"words": "part0", "split": "part1", "block": "part2", "join": "part3"}
    named = {f"{owners[name.partition('.')[0]]}.{name}": parameter for name, parameter in module.named_parameters()}

    def forward(batch: dict[str, Tensor]) -> dict[str, Tensor]:
        scores, extra = module(batch["ids"], batch["weight"])
        return {"part4": scores, "part3_1": extra}

    return steps(forward, named, clock)


LAYOUTS = {
    "one": lay(layers=(5,)), "pp2": lay(pipeline=2, layers=(2, 3)), "zero3": lay(data=2, layers=(5,), zero=3),
    "pp2 dp2 zero_bubble_v": lay(pipeline=2, data=2, layers=(1, 1, 2, 1), schedule="zero_bubble_v", zero=1),
}


@pytest.mark.parametrize("name", cases(LAYOUTS, ("pp2 dp2 zero_bubble_v",)))
def test_a_module_with_cut_points_equals_itself(name: str) -> None:
    assert distance(LAYOUTS[name], make=parts, reference=alone) < EXACT
