"""Random models on random layouts equal one process of plain transformers, in fp64 to 1e-12; also steps and
microbatches in which no label counts."""

from __future__ import annotations

from pathlib import Path
from random import Random

import pytest
from layouts import JOB, run_engine, run_plain, write_text

from hpc_mp.job import JobSpec, load_job

EXACT = 1e-12
QUICK = (1, 5)  # run by every `make test`; the others are proofs
SEEDS = range(60)


@pytest.mark.parametrize("seed", [pytest.param(seed, marks=() if seed in QUICK else pytest.mark.prove) for seed in SEEDS])
def test_a_random_layout_of_a_random_model_is_exact(tmp_path: Path, seed: int) -> None:
    write_text(tmp_path)
    alone, together = draw(seed, tmp_path)
    one = run_engine(alone)
    if alone.train.dropout == 0:
        assert one.distance(run_plain(alone)) < EXACT
    assert run_engine(together).distance(one) < EXACT


def draw(seed: int, directory: Path) -> tuple[JobSpec, JobSpec]:
    """The same training in one process and on several ranks."""
    random = Random(seed)
    tensor = random.choice((1, 1, 2, 4))
    pipeline = random.choice([p for p in (1, 1, 2, 3, 4, 5, 7) if p * tensor <= 8])
    data = random.choice([d for d in (1, 2, 3, 4, 5, 8) if d * tensor * pipeline <= 8])
    zero = random.randrange(4)
    microbatches = random.choice((1, 2, 3, 5))
    training = {
        "global_batch": data * microbatches * random.choice((1, 1, 2, 3)),
        "dropout": random.choice((0.0, 0.0, 0.1)),
        "weight_decay": random.choice((0.0, 0.1)),
        "clip": random.choice((0.0, 1e-3, 0.5)),
        "seed": seed,
        **random.choice(({}, {}, {"optimizer": "sgd", "learning_rate": 0.5, "momentum": random.choice((0.0, 0.9))})),
    }
    layout = {
        "tensor": tensor, "pipeline": pipeline, "zero": zero, "microbatches": microbatches,
        "schedule": random.choice(("gpipe", "1f1b")), "order": "".join(random.sample("DPT", 3)),
    }
    if zero and random.random() < 0.4:
        layout["shard_degree"] = random.choice([s for s in range(1, data + 1) if data % s == 0])
    layers = random.randint(pipeline, max(pipeline, 5))
    if random.random() < 0.3:
        cuts = sorted(random.sample(range(1, layers), pipeline - 1))
        layout["partition"] = [end - begin for begin, end in zip([0, *cuts], [*cuts, layers], strict=True)]
    length = random.choice((1, 2, 7, 24, 33))
    path = directory / f"{seed}.toml"
    path.write_text(JOB.format(model=draw_model(random, tensor, layers, length)))
    common = [f"data.sequence_length={length}", *(f"train.{key}={value}" for key, value in training.items())]
    ranks = [f"job.ranks_per_node={tensor * pipeline * data}", *(f"parallel.{key}={value}" for key, value in layout.items())]
    return load_job(path, common), load_job(path, [*common, *ranks])


def draw_model(random: Random, tensor: int, layers: int, positions: int) -> str:
    """A config, as inline TOML, that ``tensor`` ranks can share."""
    kv_heads = tensor * random.choice((1, 1, 2))
    tied = random.choice(("true", "false"))
    inner = random.choice([n for n in (5, 17, 30, 33) if -(-n // tensor) * (tensor - 1) < n])
    vocabulary = random.choice((257, 263, 300))
    if random.random() < 0.5:
        hidden = kv_heads * random.choice((1, 3, 4))
        return (f'model_type = "gpt2", n_layer = {layers}, n_embd = {hidden}, n_head = {kv_heads}, n_inner = {inner}, '
                f"vocab_size = {vocabulary}, n_positions = {positions}, tie_word_embeddings = {tied}, "
                "resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0, layer_norm_epsilon = 1e-2")
    heads = kv_heads * random.choice((1, 2, 3))
    return (f'model_type = "llama", num_hidden_layers = {layers}, hidden_size = {heads * random.choice((1, 2, 3))}, '
            f"num_attention_heads = {heads}, num_key_value_heads = {kv_heads}, head_dim = {random.choice((2, 4, 6))}, "
            f"intermediate_size = {inner}, vocab_size = {vocabulary}, max_position_embeddings = {positions}, "
            f"tie_word_embeddings = {tied}, attention_bias = {random.choice(('true', 'false'))}, "
            f"mlp_bias = {random.choice(('true', 'false'))}, rms_norm_eps = 1e-2")
