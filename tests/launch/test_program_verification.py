"""``hpc-mp verify --program``: a script's losses with two tensor ranks beside those with one, on emulated ranks."""

import json
import re
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from click.testing import CliRunner, Result

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.main import cli

SCRIPT = """
import os, sys, time
import hpc_mp

tensor, fault = int(sys.argv[1]), sys.argv[2]
assert int(os.environ["WORLD_SIZE"]) == tensor
if fault == "fails":
    sys.exit("the third layer has no head")
for step in range(1, 5):
    loss = 1 / step + (1e-3 if fault == "gradients" and tensor == 2 and step > 1 else 1e-9 * tensor)
    if fault != "silent":
        hpc_mp.log(step=step, loss=loss, seconds=1.0)
if fault == "endless":
    time.sleep(600)
"""
LOOP = """
import sys, torch, hpc_mp
from torch import nn

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.up, self.down = nn.Linear(16, 32), nn.Linear(32, 16)
    def forward(self, hidden):
        inner = self.up(hidden)
        return hidden + self.down(inner.softmax(-1) if sys.argv[2] == "softmax" else inner.tanh())

layers = [hpc_mp.LayerSpec("words", lambda: nn.Embedding(8, 16), uses=("ids",)),
          hpc_mp.LayerSpec("block", Block, cut={"up": "column", "down": "row"})]
run = hpc_mp.parallel(layers, tp_size=int(sys.argv[1]), precision="fp64", optimizer={"lr": 0.1},
                      loss_fn=lambda out, batch: (out["hidden"].square().sum(), torch.tensor(out["hidden"].numel())))
for step in range(3):
    run.step({"ids": torch.arange(8).view(2, 4)})
"""


def verified(place: Path, text: str, *words: str, options: Sequence[str] = ()) -> Result:
    (place / "train.py").write_text(text)
    command = ["verify", "--program", "--set", "job.device=cpu", *options, "--", sys.executable, str(place / "train.py"), *words]
    return CliRunner().invoke(cli, command, standalone_mode=False, catch_exceptions=False)


@pytest.mark.parametrize(("fault", "code", "words"), [
    ("endless", 0, "verified 3 losses with two tensor ranks are those with one (within 3e-09)"),
    ("gradients", 1, "differs the loss of step 2 is 0.501 with two tensor ranks, and 0.500000001 with one"),
    ("silent", 2, "the program with {tensor} = 1: has said the loss of 0 steps by hpc_mp.log"),
    ("fails", 2, "the program with {tensor} = 1: failed: ")])
def test_a_script_is_compared_with_itself(tmp_path: Path, fault: str, code: int, words: str) -> None:
    if code == 2:
        with pytest.raises(HpcMpError, match=re.escape(words)):
            verified(tmp_path, SCRIPT, "{tensor}", fault)
    else:
        result = verified(tmp_path, SCRIPT, "{tensor}", fault)
        assert result.return_value == code and words in " ".join(result.output.split())


def test_a_script_without_a_degree_is_refused(tmp_path: Path) -> None:
    with pytest.raises(HpcMpError, match=re.escape("has no {tensor}, so that its tensor degree")):
        verified(tmp_path, SCRIPT, "1", "none")


@pytest.mark.prove
@pytest.mark.parametrize(("inner", "code"), [("tanh", 0), ("softmax", 1)])
def test_a_loop_over_tensor_ranks_is_verified_or_its_wrong_cut_found(tmp_path: Path, inner: str, code: int) -> None:
    result = verified(tmp_path, LOOP, "{tensor}", inner, options=["--json"])
    document = json.loads(result.stdout)
    assert result.return_value == code and document["equal"] == (code == 0) and len(document["losses"]) == 3
    assert code or document["difference"] < 1e-12
