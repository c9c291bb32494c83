"""Memory and time of loading a checkpoint: four ranks at pipeline 2 × tensor 2, and one process of plain ``from_pretrained``.

    python benchmarks/loading.py [--hidden 2048] [--layers 7] [--rounds 3] [--json FILE]

The model is a Llama in fp32, 2 GB by default, in shards as ``save_pretrained`` writes them; it is trained in fp32 too, by SGD,
whose state is nothing. Each process imports everything, waits for all others, and then makes and loads its part. Memory is
anonymous memory (RssAnon of /proc): RSS also counts pages of mapped files, which belong to the kernel's cache. It is the largest
growth while values are read, seen once in a millisecond, beside the bytes of the parameters that the process then holds. Files
are in the kernel's cache. ``ready`` is the time until each parameter has been written once, as the first step does:
``from_pretrained`` leaves parameters in mapped files until then.
"""

import json
import os
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from statistics import median
from typing import Any
from unittest.mock import patch

import click

from hpc_mp.train.parallel.fill import Source

RANKS, TENSOR, PIPELINE, PERIOD_S, MB = 4, 2, 2, 0.001, 1e6
VOCABULARY, HEAD = 32_000, 128

Figures = dict[str, float]


def anonymous() -> int:
    """Return the bytes of anonymous memory of this process."""
    with open("/proc/self/status", encoding="ascii") as status:
        return next(int(line.split()[1]) << 10 for line in status if line.startswith("RssAnon"))


@contextmanager
def watched(figures: Figures) -> Iterator[None]:
    """Note the largest growth of anonymous memory, the growth at the end, and the seconds."""
    began = time.perf_counter()
    before, ended, peak = anonymous(), threading.Event(), [0]

    def watch() -> None:
        while not ended.wait(PERIOD_S):
            peak[0] = max(peak[0], anonymous())

    thread = threading.Thread(target=watch)
    thread.start()
    yield
    after = anonymous()
    ended.set()
    thread.join()
    figures |= {"peak": max(peak[0], after) - before, "growth": after - before, "read": time.perf_counter() - began}


def load(directory: str, plain: bool) -> None:
    """Load a checkpoint in this process, when standard input says so. Print the figures as JSON."""
    import torch
    from transformers import AutoModelForCausalLM
    from transformers.models.llama import modeling_llama  # noqa: F401

    import hpc_mp
    from hpc_mp.train.step.engine import Engine

    divide, start = hpc_mp.parallel, Engine.start  # the first imports the engine
    torch.set_num_threads(1)
    figures: Figures = {}

    def watched_start(engine: Engine, source: Source) -> None:
        with watched(figures):
            start(engine, source)

    print("ready", flush=True)
    sys.stdin.readline()
    began = time.perf_counter()
    if plain:
        with watched(figures):
            model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
            tensors: Sequence[torch.Tensor] = [parameter.data for parameter in model.parameters()]
    else:
        with patch.object(Engine, "start", watched_start):
            run = divide(directory, tp_size=TENSOR, pp_size=PIPELINE, optimizer={"name": "sgd", "lr": 1e-3})
        tensors = [unit.whole for unit in run.engine.data.units.values()]
    figures |= {"seconds": time.perf_counter() - began, "share": sum(tensor.nbytes for tensor in tensors)}
    for tensor in tensors:
        tensor += 1
    figures["ready"] = time.perf_counter() - began
    print(json.dumps(figures), flush=True)
    sys.stdin.readline()


def together(directory: Path, plain: bool) -> list[Figures]:
    """Load in one process, or on all ranks."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        port = server.getsockname()[1]
    count = 1 if plain else RANKS
    common = {**os.environ, "WORLD_SIZE": str(count), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port)}
    processes = [subprocess.Popen([sys.executable, __file__, "--load", str(directory), *["--plain"] * plain], text=True,
                                  stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                  env=common | {"RANK": str(rank), "LOCAL_RANK": str(rank)}) for rank in range(count)]
    answers = []
    for line in ("ready", "figures"):
        texts = [process.stdout.readline() for process in processes if process.stdout]
        if "" in texts:
            sys.exit(processes[texts.index("")].communicate()[1])
        answers.append(texts)
        for process in processes:
            assert process.stdin
            process.stdin.write(f"{line}\n")
            process.stdin.flush()
    for process in processes:
        process.communicate()
    return [json.loads(text) for text in answers[1]]


def write_checkpoint(directory: Path, hidden: int, layers: int) -> int:
    """Write the model, all of zeros. Return its bytes."""
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM
    from transformers.utils import logging

    logging.disable_progress_bar()
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(
            vocab_size=VOCABULARY, hidden_size=hidden, intermediate_size=hidden * 11 // 4, num_hidden_layers=layers,
            num_attention_heads=hidden // HEAD, max_position_embeddings=4096, dtype=torch.float32))
    model.to_empty(device="cpu")
    for parameter in model.parameters():
        parameter.data.zero_()
    model.save_pretrained(directory, max_shard_size="1GB")
    return sum(parameter.nbytes for parameter in model.parameters())


@click.command(help=__doc__.split("\n")[0])
@click.option("--hidden", default=2048, show_default=True, help="a multiple of 256")
@click.option("--layers", default=7, show_default=True)
@click.option("--rounds", default=3, show_default=True)
@click.option("--json", "file", type=Path, help="write all figures into this file")
@click.option("--load", "directory", hidden=True)
@click.option("--plain", is_flag=True, hidden=True)
def main(hidden: int, layers: int, rounds: int, file: Path | None, directory: str | None, plain: bool) -> None:
    if directory is not None:
        load(directory, plain)
        return
    with tempfile.TemporaryDirectory(dir=file.parent if file else None) as folder:
        bytes_of_model = write_checkpoint(Path(folder), hidden, layers)
        print(f"{bytes_of_model / 1e9:.2f} GB of fp32")
        rows: dict[str, list[Any]] = {"plain": [], "ranks": []}
        for _ in range(rounds):
            for name, results in rows.items():
                results.append(together(Path(folder), name == "plain"))
    if file:
        file.write_text(json.dumps(rows) + "\n", encoding="utf-8")
    for rank, figures in enumerate(zip(*rows["ranks"], strict=True)):
        show(f"rank {rank}", figures)
    show("from_pretrained", [result[0] for result in rows["plain"]])
    for key in ("read", "seconds", "ready"):
        ours, theirs = ([max(figures[key] for figures in result) for result in rows[name]] for name in ("ranks", "plain"))
        print(f"{key}: ranks {', '.join(f'{s:.1f}' for s in ours)}, from_pretrained {', '.join(f'{s:.1f}' for s in theirs)}; "
              f"ratio of medians {median(ours) / median(theirs):.2f}")


def show(name: str, figures: Sequence[Figures]) -> None:
    most = max(figures, key=lambda one: one["peak"] - one["share"])
    print(f"{name:<16}share {most['share'] / MB:8.1f} MB, peak {most['peak'] / MB:8.1f} MB: "
          f"{(most['peak'] - most['share']) / MB:+7.1f} MB; after it {most['growth'] / MB:8.1f} MB")


if __name__ == "__main__":
    main()
