"""A finished recipe beside transformers' Trainer: the same first values, samples, seed and steps, in one process.

    python beside_trainer.py gptj/runs/gptj [--json]

Samples and their order are those of the run. Labels are already shifted and the loss is a mean over those that count, so that the
Trainer gets a function of the loss; all else is its own: forward, backward, clipping, optimizer and learning rates.
"""

import argparse
import importlib.util
import json
import tempfile
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from peft import PeftModel
from safetensors.torch import save_file
from torch import Tensor, nn
from transformers import AutoModelForCausalLM, AutoModelForMaskedLM, PrinterCallback, Trainer, TrainingArguments
from transformers.utils import logging

from hpc_mp.job import JobSpec
from hpc_mp.job.layout import read_shape
from hpc_mp.job.load import load_resolved
from hpc_mp.job.spec import Train
from hpc_mp.layout.models import family_of
from hpc_mp.layout.models.adapter_weights import trained_weights
from hpc_mp.layout.models.peft_files import CONFIG, WEIGHTS, config_document, stored_names, stored_shape
from hpc_mp.rundir import RunDirectory, find_run, read_lines
from hpc_mp.train.data import IGNORE, Samples, load_tokens
from hpc_mp.train.parallel.masks import begins_of
from hpc_mp.train.rank.first_values import first_values

Sample = dict[str, Tensor]


@dataclass(frozen=True)
class Training:
    """The training of a run: the model with its first values, the sample at each position of their order, and the settings."""

    model: nn.Module
    sample: Callable[[int], Sample]
    settings: Train

    def __len__(self) -> int:
        return self.settings.steps * self.settings.global_batch

    def __getitem__(self, position: int) -> Sample:
        return self.sample(position)


def of_job(run: RunDirectory, spec: JobSpec) -> Training:
    """Return the training of a job file's run, with its tokens."""
    tokens = load_tokens(run.cache / run.tokens.read_text(encoding="utf-8").split()[0])
    samples = Samples(tokens, spec.data.sequence_length, spec.train.seed, spec.data.documents, spec.data.weights)
    places = torch.arange(spec.data.sequence_length)

    def sample(position: int) -> Sample:
        ids, labels = map(torch.from_numpy, samples.at(position))
        documents = samples.documents([position])
        begins = 0 if documents is None else begins_of(torch.from_numpy(documents), places)[0]
        return {"input_ids": ids, "labels": labels, "position_ids": places - begins}

    model = AutoModelForCausalLM.from_pretrained(spec.model.pretrained, dtype=torch.float32)
    return Training(with_adapters(model, spec) if spec.lora.rank else model, sample, spec.train)


def with_adapters(model: nn.Module, spec: JobSpec) -> nn.Module:
    """Return the model with PEFT's adapters, which begin with the values of ours."""
    shape = read_shape(spec)
    family, source = family_of(shape), first_values(spec, shape)
    names = stored_names(family, shape)
    values = {names[factor.name]: source(factor, tuple(slice(0, size) for size in factor.shape)).reshape(stored_shape(factor))
              for factor in trained_weights(family, shape)}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, CONFIG).write_text(json.dumps(config_document(family, shape, None)), encoding="utf-8")
        save_file(values, Path(folder, WEIGHTS))
        return PeftModel.from_pretrained(model, folder, is_trainable=True)


def of_program(folder: Path) -> Training:
    """Return the training of the BERT recipe, whose program has samples and settings."""
    found = importlib.util.spec_from_file_location("program", folder / "train.py")
    assert found is not None and found.loader is not None
    program = importlib.util.module_from_spec(found)
    found.loader.exec_module(program)
    optimizer = {"learning_rate" if name == "lr" else "optimizer" if name == "name" else name: value
                 for name, value in program.OPTIMIZER.items()}
    return Training(AutoModelForMaskedLM.from_pretrained(folder / "model"), program.sample,
                    Train(global_batch=program.BATCH, **optimizer))


def losses_of_trainer(training: Training) -> list[float]:
    """Train the steps of the run with transformers' Trainer. Return the loss of each."""
    settings, losses = training.settings, list[float]()

    def loss(outputs: Any, labels: Tensor, num_items_in_batch: Any = None) -> Tensor:
        mean = nn.functional.cross_entropy(outputs.logits.flatten(0, 1).float(), labels.flatten(), ignore_index=IGNORE)
        losses.append(mean.item())
        return mean

    options = settings.lr_schedule_options.model_dump(exclude_none=True)
    with tempfile.TemporaryDirectory() as folder:
        trainer = Trainer(model=training.model, train_dataset=training, compute_loss_func=loss, args=TrainingArguments(
            output_dir=folder, max_steps=settings.steps, per_device_train_batch_size=settings.global_batch, seed=settings.seed,
            train_sampling_strategy="sequential", learning_rate=settings.learning_rate, warmup_steps=settings.warmup_steps,
            lr_scheduler_type=settings.lr_schedule, lr_scheduler_kwargs=options, weight_decay=settings.weight_decay,
            adam_beta1=settings.betas[0], adam_beta2=settings.betas[1], adam_epsilon=settings.eps, max_grad_norm=settings.clip,
            use_cpu=True, report_to=[], disable_tqdm=True, save_strategy="no", logging_strategy="no",
            remove_unused_columns=False))
        trainer.remove_callback(PrinterCallback)
        trainer.train()
    return losses


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("run", type=Path, help="a run, or the folder of a job's runs")
    parser.add_argument("--json", action="store_true", help="print all losses as JSON")
    arguments = parser.parse_args()
    logging.disable_progress_bar()
    run = find_run(arguments.run)
    spec = load_resolved(run.job)
    training = of_job(run, spec) if isinstance(spec, JobSpec) else of_program(run.path.parents[2])
    ours, theirs = [line["loss"] for line in read_lines(run.metrics)], losses_of_trainer(training)
    if arguments.json:
        print(json.dumps({"hpc-mp": ours, "Trainer": theirs}))
        return
    print("| step | hpc-mp | Trainer |\n|---|---|---|")
    for step in sorted({0, *range(9, len(ours), 10), len(ours) - 1}):
        print(f"| {step + 1} | {ours[step]:.4f} | {theirs[step]:.4f} |")
    print(f"\nlargest difference of a step: {max(abs(one - other) for one, other in zip(ours, theirs, strict=True)):.1e}")


if __name__ == "__main__":
    main()
