"""One rank of DeepSpeed on the workload of ``throughput.py``; rank 0 prints the seconds of each step as JSON.

The model is Hugging Face's Llama, the optimizer torch's fused AdamW as in our engine. Started by ``against_deepspeed.py``.
"""

import argparse
import json
import os
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import deepspeed
import torch
from deepspeed.pipe import LayerSpec, PipelineModule
from torch import Tensor, nn
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.models.llama import modeling_llama as llama

from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.inputs import find_files
from hpc_mp.job.layout import read_config
from hpc_mp.train.data import Samples, prepare


class Embedding(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.embed_tokens = nn.Embedding(config.vocab_size, config.hidden_size)

    def forward(self, ids: Tensor) -> Tensor:
        return self.embed_tokens(ids)


class Block(nn.Module):
    def __init__(self, config: Any, layer: int) -> None:
        super().__init__()
        self.block, self.rotary = llama.LlamaDecoderLayer(config, layer), llama.LlamaRotaryEmbedding(config)

    def forward(self, hidden: Tensor) -> Tensor:
        positions = torch.arange(hidden.shape[1]).unsqueeze(0)
        return self.block(hidden, attention_mask=None, position_embeddings=self.rotary(hidden, positions))


class Head(nn.Module):
    def __init__(self, config: Any) -> None:
        super().__init__()
        self.norm = llama.LlamaRMSNorm(config.hidden_size, config.rms_norm_eps)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)

    def forward(self, hidden: Tensor) -> Tensor:
        return self.lm_head(self.norm(hidden))


def loss_of(logits: Tensor, labels: Tensor) -> Tensor:
    return nn.functional.cross_entropy(logits.flatten(0, 1).float(), labels.flatten())


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("job", type=Path)
    parser.add_argument("--zero", type=int, required=True)
    parser.add_argument("--pipeline", type=int, required=True)
    parser.add_argument("--microbatches", type=int, required=True)
    parser.add_argument("--precision", choices=("fp32", "bf16"), required=True)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    spec = load_job(arguments.job)
    rank, world = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"])
    data_degree = world // arguments.pipeline
    deepspeed.init_distributed("gloo", verbose=False)
    config = AutoConfig.for_model(**read_config(spec))
    config._attn_implementation = "sdpa"
    settings = {
        "train_batch_size": spec.train.global_batch,
        "train_micro_batch_size_per_gpu": spec.train.global_batch // data_degree // arguments.microbatches,
        "gradient_clipping": 0.0, "zero_optimization": {"stage": arguments.zero}, "zero_allow_untested_optimizer": True,
        "bf16": {"enabled": arguments.precision == "bf16"}, "steps_per_print": 10**9, "wall_clock_breakdown": False,
    }
    torch.manual_seed(0)
    if arguments.pipeline > 1:
        layers = [LayerSpec(Embedding, config), *(LayerSpec(Block, config, n) for n in range(config.num_hidden_layers)),
                  LayerSpec(Head, config)]
        model: Any = PipelineModule(layers, num_stages=arguments.pipeline, loss_fn=loss_of, partition_method="parameters")
    else:
        model = AutoModelForCausalLM.from_config(config)
    chosen = torch.optim.AdamW(model.parameters(), lr=spec.train.learning_rate, betas=spec.train.betas, eps=spec.train.eps,
                               weight_decay=spec.train.weight_decay, fused=True)
    engine, *_ = deepspeed.initialize(model=model, optimizer=chosen, config=settings)
    replica = engine.grid.get_data_parallel_rank() if arguments.pipeline > 1 else rank
    batches = microbatches(spec, replica, data_degree, arguments.microbatches)
    seconds = []
    for _ in range(spec.train.steps):
        began = time.perf_counter()
        if arguments.pipeline > 1:
            engine.train_batch(batches)
        else:
            for _ in range(arguments.microbatches):
                ids, labels = next(batches)
                engine.backward(loss_of(engine(ids, use_cache=False).logits, labels))
                engine.step()
        seconds.append(time.perf_counter() - began)
    if rank == 0:
        print("\n" + json.dumps(seconds), flush=True)
    torch.distributed.barrier()
    sys.stdout.flush()
    os._exit(0)


def microbatches(spec: JobSpec, replica: int, data_degree: int, count: int) -> Iterator[tuple[Tensor, Tensor]]:
    tokens = prepare(find_files(spec.data.files), tokenizer_directory=None, pretrained=None,
                     vocabulary=read_config(spec)["vocab_size"], cache=Path(spec.job.directory) / ".cache")
    samples = Samples(tokens, spec.data.sequence_length, spec.train.seed)
    size = spec.train.global_batch // data_degree // count
    for step in range(spec.train.steps):
        begin = step * spec.train.global_batch + replica * size * count
        for microbatch in range(count):
            ids, labels = samples.batch(range(begin + microbatch * size, begin + (microbatch + 1) * size))
            yield torch.from_numpy(ids), torch.from_numpy(labels)


if __name__ == "__main__":
    main()
