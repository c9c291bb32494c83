"""The loss of a few tokens at a time, and blocks compiled: the same training."""

import re
from itertools import product
from pathlib import Path

import pytest
import torch
from engines import run_engine
from exact import EXACT, LAYOUTS, ONE_STEP, WRONG, Engine, Reference, cases
from layouts import MODELS, job, layout, start
from planting import before_steps, wrapped
from ranks import run_ranks, train

from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir import read_lines
from hpc_mp.train.model import vocabulary
from hpc_mp.train.parallel import projection
from hpc_mp.train.rank.assemble import check_compiler

eleven_rows = wrapped(vocabulary, "CHUNK", lambda chunk: 307 * 11)  # of 307 words; two ranks take twice as many


def forgotten_chunk() -> None:
    """The negative control: of a chunk that is not the last one the weight gets no gradient."""
    eleven_rows()
    wrapped(projection.Projection, "add_weight_gradient", lambda add: lambda self, x, gradient, more=False: (
        None if more else add(self, x, gradient)))()


CASES = [("llama", layout()), ("gptj", LAYOUTS["dp2 zero3"]), ("llama-tied", LAYOUTS["tp2 pp2 dp2 zero1"]),
         ("gpt2", LAYOUTS["sp2 pp2 zero_bubble"]), ("llama-tied", LAYOUTS["pp2 dp2 zero3 zero_bubble_v"])]


@pytest.mark.parametrize(("model", "overrides"), CASES, ids=lambda each: each if isinstance(each, str) else "")
def test_chunks_change_nothing(place: Path, reference: Reference, model: str, overrides: list[str]) -> None:
    assert run_engine(job(place, model, overrides), before=eleven_rows).distance(reference(model)) < EXACT


def test_a_forgotten_chunk_is_seen(place: Path, engine: Engine) -> None:
    assert run_engine(job(place, "llama", [ONE_STEP]), before=forgotten_chunk).distance(engine("llama", ONE_STEP)) > WRONG


@pytest.mark.parametrize("cap", [None, 0.7])
def test_no_more_than_a_chunk_of_logits_is_there_at_once(monkeypatch: pytest.MonkeyPatch, cap: float | None) -> None:
    rows: list[int] = []
    for name in ("_scores", "_slopes"):
        def noted(logits: torch.Tensor, *given: object, real: object = getattr(vocabulary, name)) -> object:
            rows.append(len(logits))
            return real(logits, *given)  # type: ignore[operator]

        monkeypatch.setattr(vocabulary, name, noted)
    monkeypatch.setattr(vocabulary, "CHUNK", 50 * 8)

    class Head:
        """A projection of 8 numbers to 50 words, which is alone."""

        weight = torch.randn(50, 8, dtype=torch.float64)
        gradient = torch.zeros_like(weight)

        class tensor:
            size, axis = 1, type("axis", (), {"size": 1})
            weights = type("queue", (), {"put_off": lambda self, add, x, g: add(x, g),
                                         "meanwhile": lambda self: None})()
            part = staticmethod(lambda words: (0, words))
            enter = share = staticmethod(lambda x, *_: x)
            total = staticmethod(lambda loss: loss)

        def product(self, x: torch.Tensor) -> torch.Tensor:
            return x @ self.weight.t()

        def input_gradient(self, gradient: torch.Tensor) -> torch.Tensor:
            return gradient @ self.weight

        def add_weight_gradient(self, x: torch.Tensor, gradient: torch.Tensor, more: bool = False) -> None:
            self.gradient += gradient.t() @ x

    head = Head()
    objective = vocabulary.NextToken(head, 50, head.tensor, cap, False)  # type: ignore[arg-type]
    hidden = torch.randn(3, 10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (3, 10))
    labels[0, :4] = vocabulary.IGNORED
    loss, count = objective(hidden, {"labels": labels}, lambda tokens: tokens)
    loss.backward(torch.tensor(0.25, dtype=torch.float64))
    assert rows == [8, 8, 8, 6] * 2 and int(count) == 26

    plain, weight = hidden.detach().clone().requires_grad_(), Head.weight.clone().requires_grad_()
    logits = plain @ weight.t()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (whole * 0.25).backward()
    assert torch.allclose(whole, loss, atol=EXACT) and torch.allclose(plain.grad, hidden.grad, atol=EXACT)  # type: ignore[arg-type]
    assert torch.allclose(weight.grad, head.gradient, atol=EXACT)  # type: ignore[arg-type]


COMPILED = {"microbatches": layout(microbatches=2), "tp2": layout(2), "recompute": layout(microbatches=2, recompute='"full"')}
QUICK = {("llama", "tp2"), ("mixtral", "microbatches"), ("gpt2", "recompute")}


@pytest.mark.parametrize(("model", "name"), cases(product(MODELS, COMPILED), QUICK))
def test_compiled_blocks_train_alike(place: Path, engine: Engine, model: str, name: str) -> None:
    overrides = ['train.precision="fp32"', *COMPILED[name]]
    eager = engine(model, *overrides)
    spec = job(place, model, [*overrides, "train.compile=true"])
    run = start(spec)

    def rank() -> tuple[int, list[int]]:
        from torch._dynamo.utils import counters

        compile_ = torch.compile
        torch.compile = lambda given, **how: compile_(given, backend="aot_eager", **how)  # type: ignore[assignment]
        graphs: list[int] = []  # before each step, and at the end
        before_steps(lambda step: graphs.append(counters["stats"]["unique_graphs"]))()
        return train(run.job), [*graphs, counters["stats"]["unique_graphs"]]

    results = run_ranks(spec.ranks, rank, timeout=250.0)
    assert all(code == 0 and 3 <= graphs[-1] <= 40 for code, graphs in results), (results, run.main_log.read_text())
    assert all(graphs[2] == graphs[-1] and len(graphs) == 4 for _, graphs in results), "none is made after the second step"
    lines = read_lines(run.metrics)
    assert max(abs(line["loss"] - loss) for line, loss in zip(lines, eager.losses, strict=True)) < 1e-5
    assert max(abs(line["grad_norm"] / norm - 1) for line, norm in zip(lines, eager.norms, strict=True)) < 1e-4


@pytest.mark.parametrize(("device", "program"), [("cuda", "gcc"), ("cpu", "g++")])
def test_a_node_without_a_compiler_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, device: str, program: str) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(HpcMpError, match=rf"train\.compile = true: needs one of {re.escape(program)}, .* has none"):
        check_compiler(torch.device(device))
    (tmp_path / program).touch(mode=0o755)
    check_compiler(torch.device(device))


def test_double_precision_is_not_compiled(place: Path) -> None:
    with pytest.raises(HpcMpError, match=r"train\.compile = true: is not supported with train\.precision"):
        job(place, "llama", ["train.compile=true"])
