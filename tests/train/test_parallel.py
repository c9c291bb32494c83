"""``hpc_mp.parallel`` equals one process of plain transformers, or of plain torch, to 1e-12."""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any, cast

import beside
import lists
import modules
import pytest
import torch
from exact import EXACT, cases
from ranks import run_ranks
from safetensors.torch import load_file
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, LlamaConfig, PreTrainedModel

import hpc_mp
from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.weight_files import INDEX
from hpc_mp.train.device.precision import StaysDouble
from hpc_mp.train.own_loop import saved

WRONG = 1e-6
CONFIG = {"num_hidden_layers": 4, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "num_key_value_heads": 2,
          "vocab_size": 61, "max_position_embeddings": 32}
ADAMW = {"name": "adamw", "lr": 0.02, "eps": 0.1, "betas": (0.9, 0.95), "weight_decay": 0.0}
DECAYED = {"lr": 0.05, "eps": 0.1, "weight_decay": 0.1, "no_decay": ("*.bias", "*norm.weight")}  # as beside.Settings
SAMPLES, TOKENS, STEPS = 8, 12, 4

Loss = Callable[[Any, Mapping[str, Tensor]], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Trained:
    """Losses of steps, the loss of a batch that is not trained, and parameters by name."""

    losses: list[float]
    evaluated: float
    state: dict[str, Any]

    def distance(self, other: "Trained") -> float:
        assert self.state.keys() <= other.state.keys()
        pairs = [*zip(self.losses, other.losses, strict=True), (self.evaluated, other.evaluated)]
        return max([abs(mine - its) for mine, its in pairs] + [abs(values - other.state[name]).max()
                                                               for name, values in self.state.items()])


def batch_of(step: int) -> dict[str, Tensor]:
    """A global batch; that of the last step is shorter and has fewer samples."""
    samples, tokens = (SAMPLES, TOKENS) if step < STEPS - 1 else (SAMPLES // 2, TOKENS - 4)
    generator = torch.Generator().manual_seed(step)
    ids = torch.randint(61, (samples, tokens + 1), generator=generator)
    labels = ids[:, 1:].clone()
    labels[torch.rand(labels.shape, generator=generator) < 0.3] = -100
    return {"input_ids": ids[:, :-1], "labels": labels}


def cross_entropy(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    loss = nn.functional.cross_entropy(outputs.logits.flatten(0, 1), batch["labels"].flatten(), reduction="sum")
    return loss, (batch["labels"] != -100).sum()


def with_z_loss(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """Two terms, and another number than that of the labels to divide by."""
    loss, count = cross_entropy(outputs, batch)
    return loss + 0.01 * outputs.logits.logsumexp(-1).square().sum(), count * 2


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A Hugging Face model."""
    def made() -> None:
        torch.manual_seed(0)
        AutoModelForCausalLM.from_config(LlamaConfig(**CONFIG)).double().save_pretrained(path)

    path = tmp_path_factory.mktemp("model")
    run_ranks(1, made)
    return path


def plain(directory: Path, loss_of: Loss = cross_entropy) -> Trained:
    """One process of transformers."""
    torch.set_num_threads(1)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float64, attn_implementation="eager")
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.02, eps=0.1, betas=(0.9, 0.95), weight_decay=0.0)
    losses = []
    with StaysDouble():
        for step in range(STEPS):
            loss, count = loss_of(model(input_ids=batch_of(step)["input_ids"]), batch_of(step))
            (loss / count).backward()
            torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            optimizer.step()
            optimizer.zero_grad()
            losses.append(float(loss / count))
        loss, count = loss_of(model(input_ids=batch_of(100)["input_ids"]), batch_of(100))
    return Trained(losses, float(loss / count), {name: values.numpy() for name, values in model.state_dict().items()})


def trained(directory: Path, keywords: Mapping[str, Any]) -> Trained:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(directory, precision="fp64", optimizer=ADAMW, **keywords)
    losses = [float(run.step(_part(run, batch_of(step), keywords))) for step in range(STEPS)]
    evaluated = run.evaluate(_part(run, batch_of(100), keywords))
    state = {name: values.numpy() for name, values in run.model_state().items()}
    run.close()
    return Trained(losses, evaluated, state)


def _part(run: Any, batch: dict[str, Tensor], keywords: Mapping[str, Any]) -> dict[str, Tensor]:
    """The batch, or a replica's part of it."""
    if "batches" not in keywords:
        return batch
    return {name: values.chunk(run.axes.dp.size)[run.axes.dp.rank] for name, values in batch.items()}


LAYOUTS: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2": (2, {"tp_size": 2}),
    "tp2 sequence": (2, {"tp_size": 2, "sequence_parallel": True}),
    "cp2": (2, {"cp_size": 2, "zero": 3}),
    "pp2 dp2": (4, {"pp_size": 2, "microbatches": 2, "zero": 1}),
    "pp2 dp2 replica": (4, {"pp_size": 2, "microbatches": 2, "zero": 2, "batches": "replica"}),
    "tp2 pp2 dp2": (8, {"tp_size": 2, "pp_size": 2, "microbatches": 2, "zero": 2, "schedule": "zero_bubble"}),
    "dp4 zero3 full": (4, {"zero": 3, "recompute": "full"}),
    "tp2 loss_fn": (2, {"tp_size": 2, "loss_fn": with_z_loss}),
    "tp2 pp2 dp2 loss_fn": (8, {"tp_size": 2, "pp_size": 2, "microbatches": 2, "sequence_parallel": True,
                                "loss_fn": with_z_loss}),
}
QUICK = ("pp2 dp2 replica", "tp2 loss_fn", "tp2 pp2 dp2")


@pytest.mark.parametrize("name", cases(LAYOUTS, QUICK))
def test_a_loop_equals_one_process(directory: Path, name: str) -> None:
    world, keywords = LAYOUTS[name]
    expected = run_ranks(1, plain, directory, keywords.get("loss_fn", cross_entropy))[0]
    first, *others = run_ranks(world, trained, directory, keywords)
    assert first.distance(expected) < EXACT
    assert len(first.state) == len(expected.state)
    assert all((other.losses, other.evaluated) == (first.losses, first.evaluated) for other in others)


def test_another_count_is_seen(directory: Path) -> None:
    """The control: a loss that is divided by another number."""
    expected = run_ranks(1, plain, directory, cross_entropy)[0]
    assert run_ranks(1, trained, directory, {"loss_fn": with_z_loss})[0].distance(expected) > WRONG


def of_layers(keywords: Mapping[str, Any]) -> Trained:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(
        lists.LAYERS, loss_fn=lists.objective, outputs=("scores", "extra"), seed=beside.SEED, precision="fp64", clip=0.5,
        optimizer=DECAYED, **keywords)
    losses = [float(run.step(lists.data(step))) for step in range(beside.STEPS)]
    evaluated = run.evaluate(lists.data(beside.STEPS))
    state = {name: values.numpy() for name, values in run.model_state().items()}
    run.close()
    return Trained(losses, evaluated, state)


LISTED: dict[str, tuple[int, dict[str, Any]]] = {
    "one": (1, {}),
    "tp2 pp2 dp2": (8, {"tp_size": 2, "pp_size": 2, "zero": 2, "microbatches": 2}),
    "pp2 interleaved": (2, {"pp_size": 2, "schedule": "interleaved_1f1b", "virtual_stages": 2, "microbatches": 4}),
}


@pytest.mark.parametrize("name", cases(LISTED, ("tp2 pp2 dp2",)))
def test_a_list_of_layers_equals_one_process(name: str) -> None:
    world, keywords = LISTED[name]
    losses, _, parameters = run_ranks(1, partial(lists.plain, apart=beside.SAMPLES))[0]
    first = run_ranks(world, of_layers, keywords)[0]
    expected = Trained(losses[:-1], losses[-1], {name: values.numpy() for name, values in parameters.items()})
    assert first.distance(expected) < EXACT
    assert first.state.keys() == parameters.keys()


ENCODER = {"num_hidden_layers": 3, "hidden_size": 32, "intermediate_size": 40, "num_attention_heads": 4, "vocab_size": 61,
           "max_position_embeddings": 32, "pad_token_id": 1}
UNDROPPED = {"hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}
ENCODERS: dict[str, dict[str, Any]] = {"bert": UNDROPPED, "roberta": UNDROPPED, "modernbert": {"local_attention": 6}}


def masked_batch(kind: str) -> dict[str, Tensor]:
    """Two kinds of tokens, if the model has any; samples end with padding."""
    generator = torch.Generator().manual_seed(1)
    ids, labels = (torch.randint(61, (4, 10), generator=generator) for _ in range(2))
    mask = (torch.arange(10) < torch.tensor([[10], [7], [9], [4]])).long()
    ids = ids.masked_fill(mask == 0, ENCODER["pad_token_id"])
    kinds = {} if kind == "modernbert" else {"token_type_ids": torch.randint(2, (4, 10), generator=generator)}
    return {"input_ids": ids, "labels": labels.masked_fill((torch.rand(4, 10, generator=generator) < 0.6) | (mask == 0), -100),
            "attention_mask": mask, **kinds}


def in_memory(kind: str) -> nn.Module:
    torch.manual_seed(0)
    config = AutoConfig.for_model(kind, **ENCODER, **ENCODERS[kind])
    with StaysDouble():
        model: nn.Module = AutoModelForMaskedLM.from_config(config).double().eval()
    return model


def masked(kind: str, begin: Path | None, out: Path, keywords: Mapping[str, Any]) -> list[float]:
    """The losses of a model, in memory or saved by transformers, before and after a step, behind which it is saved."""
    run, batch = hpc_mp.parallel(begin or in_memory(kind), precision="fp64", **keywords), masked_batch(kind)
    losses = [run.evaluate(batch), float(run.step(batch)), run.evaluate(batch)]
    run.save(out)
    run.close()
    assert losses[0] == losses[1]
    return losses[1:]


def saved_by_transformers(kind: str, directory: Path) -> None:
    cast(PreTrainedModel, in_memory(kind)).save_pretrained(directory)


def masked_alone(kind: str, out: Path) -> list[float]:
    """The same losses of transformers alone: the second one is that of the model that was saved."""
    with StaysDouble():
        saved = AutoModelForMaskedLM.from_pretrained(out, dtype=torch.float64).eval()
        return [float(model(**masked_batch(kind)).loss) for model in (in_memory(kind), saved)]


@pytest.mark.parametrize("kind", ["bert", pytest.param("roberta", marks=pytest.mark.prove), "modernbert"])
def test_a_model_learns_masked_tokens(tmp_path: Path, kind: str) -> None:
    begin = None if kind == "bert" else tmp_path / "begin"
    if begin:
        run_ranks(1, saved_by_transformers, kind, begin)
    losses = run_ranks(4, masked, kind, begin, tmp_path / "model", {"tp_size": 2, "pp_size": 2, "microbatches": 2})[0]
    alone = run_ranks(1, masked_alone, kind, tmp_path / "model")[0]
    assert max(abs(a - b) for a, b in zip(losses, alone, strict=True)) < EXACT and losses[0] - losses[1] > WRONG


def scores_of(outputs: Any, batch: Mapping[str, Tensor]) -> tuple[Tensor, Tensor]:
    """The objective of lists, of what a forward returns."""
    scores, extra = outputs
    return lists.objective({"scores": scores, "extra": extra}, batch)


def of_a_module(keywords: Mapping[str, Any], checkpoint: Path, goes_on: bool) -> Trained:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(modules.written(), loss_fn=scores_of, seed=beside.SEED, precision="fp64", clip=0.5, optimizer=DECAYED,
                          **keywords)
    if goes_on:
        run.resume(checkpoint)
    losses = [float(run.step(lists.data(step))) for step in range(run.progress.step, 1 + goes_on)]
    evaluated = run.evaluate(lists.data(beside.STEPS))
    run.checkpoint(checkpoint)
    state = {name: values.numpy() for name, values in run.model_state().items()}
    run.close()
    return Trained(losses, evaluated, state)


def test_a_module_with_cut_points_equals_itself_and_goes_on_from_another_layout(tmp_path: Path) -> None:
    losses, _, parameters = run_ranks(1, partial(modules.alone, modules.written, apart=beside.SAMPLES))[0]
    keywords = {"tp_size": 2, "pp_size": 2, "microbatches": 2, "cut": modules.CUT}
    first = run_ranks(4, of_a_module, keywords, tmp_path / "at", False)[0]
    assert abs(first.losses[0] - losses[0]) < EXACT
    second = run_ranks(2, of_a_module, {"zero": 3}, tmp_path / "at", True)[0]
    expected = Trained(losses[1:-1], losses[-1], {name: values.numpy() for name, values in parameters.items()})
    assert replace(second, state={name: second.state[name] for name in parameters}).distance(expected) < EXACT
    modules.written().load_state_dict({name: torch.as_tensor(values) for name, values in second.state.items()})  # with buffers


def in_small_files(out: Path) -> dict[str, Any]:
    """The state of a module, saved in files of 1 KB."""
    torch.set_num_threads(1)
    saved.FILE_BYTES = 1000
    run = hpc_mp.parallel(modules.written(), loss_fn=scores_of, pp_size=2, precision="fp32", optimizer=DECAYED)
    run.step(lists.data(0))
    run.save(out)
    state = {name: values.numpy() for name, values in run.model_state().items()}
    run.close()
    return state


def test_saved_files_have_the_whole_state_of_a_module(tmp_path: Path) -> None:
    state = run_ranks(2, in_small_files, tmp_path / "out")[0]
    files = sorted((tmp_path / "out").glob("*.safetensors"))
    stored = {name: values for file in files for name, values in load_file(file).items()}
    index = json.loads((tmp_path / "out" / INDEX).read_text())["weight_map"]
    assert len(files) > 2 and stored.keys() == state.keys() == index.keys() == modules.written().state_dict().keys()
    assert {"shift", "words.weight", "head.weight"} <= stored.keys()
    assert all(torch.equal(stored[name], torch.as_tensor(values)) for name, values in state.items())


class Heads(nn.Module):
    """A layer whose number of heads no shape tells."""

    def __init__(self, heads: int) -> None:
        super().__init__()
        self.heads, self.mixed = heads, nn.Linear(8, 8)

    def forward(self, x: Tensor) -> Tensor:
        return nn.functional.softmax(self.mixed(x).unflatten(-1, (self.heads, -1)), -1).flatten(-2)


def of_other_heads(checkpoint: Path) -> list[str]:
    """Whether a checkpoint is taken by models of the same shapes: the same model, and one with other heads; as each kind."""
    def started(kind: str, heads: int) -> Any:
        torch.manual_seed(0)
        if kind == "config":
            return hpc_mp.parallel({"model_type": "llama", **CONFIG, "head_dim": 32 // heads, "num_attention_heads": heads,
                                    "num_key_value_heads": heads})
        first, second = hpc_mp.LayerSpec("a", lambda: Heads(heads), ("input",)), hpc_mp.LayerSpec("b", lambda: nn.Linear(8, 8))
        layers = {"module": nn.Sequential(Heads(heads), nn.Linear(8, 8)), "list": [first, second]}
        return hpc_mp.parallel(layers[kind], loss_fn=lambda outputs, batch: (outputs.sum(), 1))

    results = []
    for kind in ("config", "module", "list"):
        started(kind, 4).checkpoint(checkpoint)
        for heads in (4, 2):
            try:
                started(kind, heads).resume(checkpoint)
                results.append("")
            except HpcMpError as error:
                results.append(error.rule)
    return results


def test_a_checkpoint_of_a_model_with_other_heads_is_refused(tmp_path: Path) -> None:
    results = run_ranks(1, of_other_heads, tmp_path / "step")[0]
    assert results[::2] == [""] * 3
    assert [reason.partition(": ")[2] for reason in results[1::2]] == [
        "head_dim is 8, and should be 16", "0 is Heads(heads=4), and should be Heads(heads=2)",
        "a is Heads(heads=4), and should be Heads(heads=2)"]


def half(directory: Path, checkpoint: Path, keywords: Mapping[str, Any]) -> None:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(directory, precision="fp64", optimizer=ADAMW, **keywords)
    for step in range(STEPS // 2):
        run.step(batch_of(step))
    run.checkpoint(checkpoint)
    run.close()


def rest(directory: Path, checkpoint: Path, out: Path, keywords: Mapping[str, Any]) -> list[float]:
    torch.set_num_threads(1)
    run = hpc_mp.parallel(directory, precision="fp64", optimizer=ADAMW, **keywords)
    run.resume(checkpoint)
    losses = [float(run.step(batch_of(step))) for step in range(run.progress.step, STEPS)]
    run.save(out)
    run.close()
    return losses


def loaded(out: Path) -> dict[str, Any]:
    model = AutoModelForCausalLM.from_pretrained(out, dtype=torch.float64)
    return {name: values.numpy() for name, values in model.state_dict().items()}


def occupied(directory: Path) -> list[str]:
    """The messages of a run that is to write over somebody's files."""
    run = hpc_mp.parallel({"model_type": "llama", **CONFIG})
    messages = []
    for write in (run.save, run.checkpoint):
        try:
            write(directory)
        except HpcMpError as error:
            messages.append(str(error))
    run.close()
    return messages


def test_nothing_else_is_replaced(tmp_path: Path) -> None:
    (tmp_path / "thesis.tex").write_text("years of work")
    messages = run_ranks(2, occupied, tmp_path)[1]
    assert len(messages) == 2 and all("nothing else is" in message for message in messages)
    assert [path.name for path in tmp_path.iterdir()] == ["thesis.tex"]


def test_a_loop_goes_on_from_another_layout_and_transformers_loads_what_it_saves(directory: Path, tmp_path: Path) -> None:
    expected = run_ranks(1, plain, directory)[0]
    run_ranks(4, half, directory, tmp_path / "step", {"tp_size": 2, "zero": 1})
    losses = run_ranks(2, rest, directory, tmp_path / "step", tmp_path / "out", {"pp_size": 2, "microbatches": 2})[0]
    state = run_ranks(1, loaded, tmp_path / "out")[0]
    assert Trained(losses, 0.0, state).distance(Trained(expected.losses[STEPS // 2:], 0.0, expected.state)) < EXACT
