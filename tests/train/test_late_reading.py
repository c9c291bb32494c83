"""A step is launched without asking the device for a number; what it came to is read when the next one has been launched."""

import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from exact import GPT2, LLAMA, TIED
from layouts import job, layout, run_whole, start
from planting import planted
from torch.utils._python_dispatch import TorchDispatchMode

from hpc_mp.rundir import read_lines
from hpc_mp.rundir.checkpoints import complete_steps
from hpc_mp.train.optimizer.optimizer import Optimizer
from hpc_mp.train.rank.saver import Saver
from hpc_mp.train.rank.trainer import Trainer
from hpc_mp.train.step.engine import Engine as RankEngine

ASKING = ("_local_scalar_dense", "is_nonzero", "nonzero", "equal", "masked_select")  # operators that make the host wait for a GPU


class Asked(TorchDispatchMode):
    """Counts what a host would wait for a GPU for."""

    def __init__(self) -> None:
        super().__init__()
        self.seen: list[str] = []

    def __torch_dispatch__(self, function: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None) -> Any:
        if function.overloadpacket.__name__ in ASKING:
            self.seen.append(function.overloadpacket.__name__)
        return function(*args, **kwargs or {})


@planted(Optimizer, "step")
def with_a_question(update: Any, optimizer: Optimizer, number: int, norm: torch.Tensor, *more: Any) -> None:
    """The negative control: the norm is printed, as it was before."""
    float(norm)
    update(optimizer, number, norm, *more)


LAYOUTS = {"1 fp16": ['train.precision="fp16"'], "pp2 dp2 zero1": layout(pipeline=2, data=2, zero=1, microbatches=2),
           "tp2 dp2 zero3": layout(2, data=2, zero=3, microbatches=2)}


def asked_in_a_step(place: Path, model: str, overrides: list[str], before: Callable[[], None] = lambda: None) -> list[list[str]]:
    spec = job(place, model, ["train.steps=2", *overrides])
    run = start(spec)
    note = run.path / "asked"

    @planted(RankEngine, "step")
    def watched(step: Any, engine: RankEngine, number: int, *more: Any) -> Any:
        """Write down what a rank asks for in its second step: some things are made in the first one."""
        if number == 0:
            return step(engine, number, *more)
        asked = Asked()
        with asked, pytest.MonkeyPatch.context() as patch:
            for name, method in ((name, getattr(torch.Tensor, name)) for name in ("tolist", "numpy")):  # gloo alone sends: cpu
                patch.setattr(torch.Tensor, name, lambda tensor, name=name, method=method: (
                    asked.seen.append(name), method(tensor))[1])
            result = step(engine, number, *more)
        with note.open("a") as file:
            file.write(json.dumps(asked.seen) + "\n")
        return result

    run_whole(spec, lambda: (before(), watched()), run)
    found = [json.loads(line) for line in note.read_text().splitlines()]
    assert len(found) == spec.ranks
    return found


@pytest.mark.parametrize(("name", "model"), [("1 fp16", GPT2), ("pp2 dp2 zero1", TIED), ("tp2 dp2 zero3", LLAMA)])
def test_a_step_asks_the_device_for_no_number(place: Path, name: str, model: str) -> None:
    assert not any(asked_in_a_step(place, model, LAYOUTS[name]))


def test_a_question_would_be_seen(place: Path) -> None:
    assert asked_in_a_step(place, GPT2, LAYOUTS["1 fp16"], with_a_question) == [["_local_scalar_dense"]]


def test_a_step_is_read_behind_the_launch_of_the_next(place: Path) -> None:
    """Before a checkpoint and at the end nothing is left to be read; every step has its line."""
    spec = job(place, GPT2, ["train.steps=5", "checkpoint.every=3", "checkpoint.keep=9"])
    run = start(spec)
    note = run.path / "order"

    def noting(owner: Any, name: str, number: Callable[..., int]) -> Callable[[], None]:
        @planted(owner, name)
        def call(original: Any, self: Any, first: Any, *rest: Any, **more: Any) -> Any:
            with note.open("a") as file:
                file.write(f"{name.removeprefix('_')}{number(first)} ")
            return original(self, first, *rest, **more)

        return call

    parts = (noting(Trainer, "_step", lambda step: step + 1), noting(Trainer, "_read", lambda launched: launched.step + 1),
             noting(Saver, "save", lambda counters: counters.step))
    run_whole(spec, lambda: [part() for part in parts], run)
    assert note.read_text().split() == [
        "step1", "step2", "read1", "step3", "read2", "read3", "save3", "step4", "step5", "read4", "read5", "save5"]
    assert [line["step"] for line in read_lines(run.metrics)] == [1, 2, 3, 4, 5]
    assert [path.name for path in complete_steps(run.checkpoints)] == ["step-00000003", "step-00000005"]
