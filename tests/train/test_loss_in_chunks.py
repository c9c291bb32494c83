"""The loss of a few tokens at a time: the same training."""

from pathlib import Path

import pytest
import torch
from engines import run_engine
from exact import EXACT, LAYOUTS, ONE_STEP, WRONG, Engine, Reference
from layouts import job, layout
from planting import wrapped

from hpc_mp.train.model import vocabulary
from hpc_mp.train.parallel import projection

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

        trained = True
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
    gradient = torch.tensor(0.25, dtype=torch.float64)
    objective = vocabulary.NextToken(head, 50, head.tensor, cap, False)  # type: ignore[arg-type]
    hidden = torch.randn(3, 10, 8, dtype=torch.float64, requires_grad=True)
    labels = torch.randint(0, 50, (3, 10))
    labels[0, :4] = vocabulary.IGNORED
    loss, count = objective(hidden, {"labels": labels}, lambda tokens: tokens, gradient)
    loss.backward(gradient)
    assert rows == [8, 8, 8, 8, 8, 8, 6, 6] and int(count) == 26

    plain, weight = hidden.detach().clone().requires_grad_(), Head.weight.clone().requires_grad_()
    logits = plain @ weight.t()
    logits = logits if cap is None else torch.tanh(logits / cap) * cap
    whole = torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten(), reduction="sum")
    (whole * 0.25).backward()
    assert torch.allclose(whole, loss, atol=EXACT) and torch.allclose(plain.grad, hidden.grad, atol=EXACT)  # type: ignore[arg-type]
    assert torch.allclose(weight.grad, head.gradient, atol=EXACT)  # type: ignore[arg-type]
