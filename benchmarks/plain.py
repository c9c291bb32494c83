"""One process of plain transformers and torch.optim: what the layouts are compared with. Prints seconds per step as JSON."""

import argparse
import json
import time
from pathlib import Path

import torch
from transformers import AutoConfig, AutoModelForCausalLM

from hpc_mp.job import load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_config
from hpc_mp.train.data import Samples, prepare


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--threads", type=int, required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    spec = load_job(arguments.job)
    settings, config = spec.train, read_config(spec)
    tokens = prepare(find_files(spec.data.files), tokenizer_directory=None, pretrained=None,
                     vocabulary=config["vocab_size"], cache=Path(spec.job.directory) / ".cache")
    samples = Samples(tokens, spec.data.sequence_length, settings.seed)
    model = AutoModelForCausalLM.from_config(
        AutoConfig.for_model(**config), attn_implementation="sdpa", dtype=torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), lr=settings.learning_rate, betas=settings.betas, eps=settings.eps,
                                  weight_decay=settings.weight_decay)
    seconds = []
    for step in range(settings.steps):
        began = time.perf_counter()
        ids, labels = (torch.from_numpy(a) for a in samples.batch(
            range(step * settings.global_batch, (step + 1) * settings.global_batch)))
        logits = model(ids, use_cache=False).logits
        torch.nn.functional.cross_entropy(logits.flatten(0, 1), labels.flatten()).backward()
        optimizer.step()
        optimizer.zero_grad()
        seconds.append(time.perf_counter() - began)
    print(json.dumps(seconds))


if __name__ == "__main__":
    main()
