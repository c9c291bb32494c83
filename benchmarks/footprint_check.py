"""The predicted memory of ranks compared with dry runs of the engine, over layouts of many kinds.

    python benchmarks/footprint_check.py [--only WORD] [--all-ranks] [--keep FILE]

Each line is a rank: predicted and counted peak in GiB, their ratio, the action of the counted peak, and the predicted lines.
A dry run takes seconds to minutes. With ``--keep``, counts are read from a JSON file and added to it; remove it with the engine.
"""

import json
import tempfile
import time
from collections.abc import Iterator, Mapping
from dataclasses import astuple, dataclass, field
from pathlib import Path

import click

from hpc_mp.job import JobSpec, load_job
from hpc_mp.job.layout import check_job, layout_of, read_shape
from hpc_mp.layout.layout import Layout
from hpc_mp.layout.models import ModelShape
from hpc_mp.layout.placement import place
from hpc_mp.planner.footprint import footprint

LLAMA = ('model_type = "{kind}", num_hidden_layers = {layers}, hidden_size = {hidden}, num_attention_heads = {heads}, '
         'num_key_value_heads = {kv}, intermediate_size = {inner}, vocab_size = {words}, max_position_embeddings = 65536')
S = {"layers": 4, "hidden": 2048, "heads": 16, "kv": 8, "inner": 5632, "words": 32000}
M = {"layers": 4, "hidden": 4096, "heads": 32, "kv": 8, "inner": 14336, "words": 128256}
QWEN = {"layers": 4, "hidden": 1024, "heads": 16, "kv": 2, "inner": 4864, "words": 151936}
GPT = ('model_type = "gpt2", n_layer = {layers}, n_embd = {hidden}, n_head = {heads}, vocab_size = 50257, n_positions = 8192, '
       'resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0')
BERT = ('model_type = "bert", num_hidden_layers = 4, hidden_size = 1024, num_attention_heads = 16, intermediate_size = 4096, '
        'vocab_size = 30522, max_position_embeddings = 4096, hidden_dropout_prob = 0.0, attention_probs_dropout_prob = 0.0')
T5 = ('model_type = "t5", d_model = 1024, num_heads = 16, d_kv = 64, d_ff = {inner}, num_layers = 3, num_decoder_layers = 3, '
      'vocab_size = 32128, dropout_rate = 0.0, decoder_start_token_id = 0{more}')
MODELS = {
    "llama": LLAMA.format(kind="llama", **S),
    "llama deep": LLAMA.format(kind="llama", **S | {"layers": 12}),
    "llama 8B": LLAMA.format(kind="llama", **M),
    "llama tied": LLAMA.format(kind="llama", **S) + ", tie_word_embeddings = true",
    "llama biased": LLAMA.format(kind="llama", **S) + ", attention_bias = true, mlp_bias = true",
    "qwen2": LLAMA.format(kind="qwen2", **QWEN),
    "qwen3": LLAMA.format(kind="qwen3", **S) + ", head_dim = 128",
    "mistral": LLAMA.format(kind="mistral", **S) + ", sliding_window = 1024",
    "gpt2": GPT.format(layers=4, hidden=1024, heads=16),
    "gpt2 wide": GPT.format(layers=4, hidden=2048, heads=16),
    "gemma2": LLAMA.format(kind="gemma2", **S | {"words": 64000}) + ", head_dim = 128, sliding_window = 1024",
    "gemma3": LLAMA.format(kind="gemma3_text", **S | {"words": 64000}) + ", head_dim = 128, sliding_window = 512",
    "mixtral": LLAMA.format(kind="mixtral", **S | {"inner": 4096}) + ", num_local_experts = 8",
    "qwen3_moe": LLAMA.format(kind="qwen3_moe", **S) + ', head_dim = 128, moe_intermediate_size = 768, '
                 'num_experts = 32, num_experts_per_tok = 4, norm_topk_prob = true',
    "gpt_neox": 'model_type = "gpt_neox", num_hidden_layers = 4, hidden_size = 2048, num_attention_heads = 16, '
                'intermediate_size = 8192, vocab_size = 50432, max_position_embeddings = 4096, hidden_dropout = 0.0, '
                'attention_dropout = 0.0',
    "llama odd": LLAMA.format(kind="llama", layers=7, hidden=1920, heads=15, kv=5, inner=5120, words=50257),
    "llama adapters": LLAMA.format(kind="llama", **S),
    "olmo2": LLAMA.format(kind="olmo2", **S),
    "phi3": LLAMA.format(kind="phi3", **S | {"words": 32064, "kv": 16}) + ", pad_token_id = 0",
    "stablelm": LLAMA.format(kind="stablelm", **S | {"kv": 16}) + ", attention_dropout = 0.0, hidden_dropout = 0.0",
    "starcoder2": LLAMA.format(kind="starcoder2", **S | {"kv": 2, "inner": 8192, "words": 49152})
                  + ", attention_dropout = 0.0, residual_dropout = 0.0, embedding_dropout = 0.0",
    "granite": LLAMA.format(kind="granite", **S | {"words": 49155}) + ", tie_word_embeddings = true",
    "glm4": LLAMA.format(kind="glm4", **S | {"kv": 2, "words": 151552}) + ", head_dim = 128, pad_token_id = 0",
    "olmoe": LLAMA.format(kind="olmoe", **S | {"inner": 1024, "kv": 16}) + ", num_experts = 16, num_experts_per_tok = 4",
    "qwen2_moe": LLAMA.format(kind="qwen2_moe", **S) + ", moe_intermediate_size = 1408, shared_expert_intermediate_size = 5632, "
                 "num_experts = 16, num_experts_per_tok = 4",
    "gptj": 'model_type = "gptj", n_layer = 4, n_embd = 2048, n_head = 16, rotary_dim = 64, vocab_size = 50400, '
            'n_positions = 4096, resid_pdrop = 0.0, embd_pdrop = 0.0, attn_pdrop = 0.0',
    "modernbert": LLAMA.format(kind="modernbert", **S | {"hidden": 1024, "kv": 16, "inner": 2624, "words": 50368})
                  .replace("num_key_value_heads = 16, ", ""),
    "roberta": BERT.replace('"bert"', '"roberta"').replace("30522", "50265").replace("4096, hidden_d", "4098, hidden_d"),
    "bert": BERT,
    "t5": T5.format(inner=4096, more=""),
    "t5 1.1": T5.format(inner=2816, more=', feed_forward_proj = "gated-gelu", tie_word_embeddings = false'),
}
MORE = {  # further settings that jobs of these models need
    "llama adapters": "[lora]\nrank = 16\n[train]\n",
    **dict.fromkeys(("bert", "modernbert", "roberta"), 'labels = ["a", "b", "c"]\n[train]\nobjective = "classification"\n'),
    "t5": 'format = "prompt"\nprompt_length = {half}\n[train]\n',
    "t5 1.1": 'format = "prompt"\nprompt_length = {half}\n[train]\n',
}
JOB = """
[job]
name = "check"
device = "cuda"
ranks_per_node = {ranks}
[model]
config = {{ {model} }}
[data]
files = ["not there"]
sequence_length = {sequence}
{more}
steps = 1
global_batch = {batch}
"""


@dataclass(frozen=True)
class Case:
    """A job: a model, tokens of a sample, samples of a microbatch, microbatches, ranks of the data axis, precision, and keys of
    ``[parallel]`` and of ``[train]``."""

    model: str
    tokens: int
    samples: int = 1
    microbatches: int = 1
    data: int = 1
    precision: str = "bf16"
    parallel: Mapping[str, object] = field(default_factory=dict)
    train: Mapping[str, object] = field(default_factory=dict)

    def spec(self, directory: Path) -> JobSpec:
        world = self.data
        for axis in ("tensor", "pipeline", "context"):
            world *= int(str(self.parallel.get(axis, 1)))
        path = directory / "job.toml"
        path.write_text(JOB.format(
            ranks=world, model=MODELS[self.model], sequence=self.tokens, batch=self.data * self.samples * self.microbatches,
            more=MORE.get(self.model, "[train]\n").format(half=self.tokens // 2)))
        keys = {f"parallel.{name}": value for name, value in self.parallel.items()}
        keys |= {f"train.{name}": value for name, value in self.train.items()}
        keys |= {"parallel.microbatches": self.microbatches, "train.precision": self.precision}
        return load_job(path, [f"{name}={_toml(value)}" for name, value in keys.items()])

    def __str__(self) -> str:
        rest = {"data": self.data, "precision": self.precision, **self.parallel, **self.train}
        return f"{self.model} {self.tokens}x{self.samples}x{self.microbatches} " + " ".join(f"{k}={v}" for k, v in rest.items())


def _toml(value: object) -> str:
    if isinstance(value, tuple):
        return f"[{', '.join(map(_toml, value))}]"
    return f'"{value}"' if isinstance(value, str) else str(value).lower() if isinstance(value, bool) else str(value)


def case(model: str, tokens: int, samples: int = 1, microbatches: int = 1, data: int = 1, precision: str = "bf16",
         train: Mapping[str, object] | None = None, **parallel: object) -> Case:
    return Case(model, tokens, samples, microbatches, data, precision, parallel, train or {})


CASES = (
    # ZeRO and when gradients are summed
    case("llama", 2048, 2, 2, data=4, zero=0),
    case("llama", 2048, 2, 2, data=4, zero=1),
    case("llama", 2048, 2, 2, data=4, zero=2),
    case("llama", 2048, 2, 2, data=4, zero=3),
    case("llama", 2048, 1, 2, data=4, zero=3, reduce="step"),
    case("llama 8B", 4096, 1, 2, data=8, zero=3, recompute="full"),
    case("llama 8B", 4096, 1, 1, data=64, zero=3),
    case("llama 8B", 8192, 1, 2, data=8, zero=2, recompute="full"),
    case("llama", 1024, 4, 2, data=4, zero=3, shard_degree=2),
    case("llama tied", 2048, 2, 2, data=4, zero=3),
    # precisions
    case("llama", 1024, 2, 1, data=2, precision="fp32"),
    case("llama", 1024, 2, 1, data=2, precision="fp64"),
    case("llama", 2048, 2, 2, data=2, precision="fp16"),
    case("llama", 1024, 2, 2, data=4, precision="fp32", zero=3),
    # recomputation
    case("llama", 4096, 2, 2, data=2, recompute="selective"),
    case("llama deep", 4096, 2, 1, data=2, recompute="full"),
    case("llama", 4096, 2, 2, data=2, recompute="every-2"),
    case("llama", 8192, 1, 4, pipeline=2, recompute="every-3"),
    # schedules
    case("llama", 2048, 1, 4, pipeline=2, schedule="gpipe"),
    case("llama deep", 2048, 2, 6, pipeline=4, schedule="1f1b"),
    case("llama", 2048, 2, 4, pipeline=2, schedule="interleaved_1f1b", virtual_stages=2),
    case("llama deep", 2048, 2, 4, pipeline=4, schedule="zero_bubble"),
    case("llama", 2048, 2, 5, pipeline=2, schedule="zero_bubble_v"),
    case("llama", 2048, 2, 3, pipeline=2, schedule="breadth_first", virtual_stages=2),
    case("llama deep", 2048, 1, 4, data=2, pipeline=2, zero=2, schedule="breadth_first", virtual_stages=2),
    case("llama deep", 4096, 1, 4, data=2, pipeline=2, zero=3, schedule="zero_bubble_v", recompute="full"),
    case("llama tied", 2048, 2, 4, pipeline=2),
    # tensor and sequence
    case("llama", 4096, 2, 2, tensor=2),
    case("llama", 4096, 2, 2, tensor=4, sequence=True),
    case("llama 8B", 8192, 1, 2, tensor=8, sequence=True, recompute="full"),
    case("llama 8B", 8192, 1, 4, tensor=4, sequence=True, pipeline=2, data=2),
    case("llama 8B", 4096, 1, 2, tensor=4, pipeline=2, recompute="full"),
    case("llama biased", 4096, 2, 2, tensor=2, sequence=True),
    case("llama", 4096, 2, 2, tensor=2, sequence=True, recompute="selective"),
    # context
    case("llama", 8192, 1, 2, context=2),
    case("llama", 8192, 1, 2, context=4, context_method="ulysses"),
    case("llama 8B", 8192, 1, 2, context=4, recompute="full", data=2, zero=3),
    case("llama", 8192, 1, 2, context=2, tensor=2, sequence=True),
    # families
    case("qwen2", 2048, 2, 2, data=2),
    case("qwen2", 4096, 1, 4, pipeline=2, recompute="full"),
    case("qwen3", 2048, 2, 2, data=2),
    case("qwen3", 4096, 2, 2, tensor=4, sequence=True),
    case("gpt2", 1024, 4, 2, data=2),
    case("gpt2", 1024, 4, 4, pipeline=2),
    case("gpt2 wide", 2048, 2, 2, tensor=2),
    case("gpt2 wide", 2048, 4, 2, data=4, zero=3, recompute="full"),
    case("gpt_neox", 2048, 2, 2, data=2),
    case("mistral", 4096, 1, 2, data=2),
    case("mistral", 4096, 2, 2, tensor=2, recompute="full"),
    case("gemma2", 2048, 1, 2, data=2),
    case("gemma2", 4096, 1, 2, data=2, recompute="full"),
    case("gemma3", 2048, 2, 2, data=2),
    # experts
    case("mixtral", 2048, 2, 2, data=2),
    case("mixtral", 2048, 2, 2, data=4, expert=4),
    case("mixtral", 2048, 2, 2, tensor=2, recompute="full"),
    case("qwen3_moe", 2048, 2, 2, data=2),
    case("qwen3_moe", 2048, 2, 2, data=8, expert=8, zero=3),
    case("qwen3_moe", 2048, 2, 2, data=4, expert=4, train={"expert_capacity": 1.25}),
    # models with encoders
    case("bert", 512, 16, 2, data=2),
    case("bert", 2048, 4, 2, data=2, recompute="full"),
    case("t5", 1024, 4, 2, data=2),
    case("t5 1.1", 2048, 2, 4, pipeline=2),
    # layouts that were written before anything of them was counted
    case("llama odd", 3000, 1, 3, data=3, zero=2),
    case("llama odd", 1536, 3, 5, pipeline=3, schedule="zero_bubble"),
    case("llama deep", 1024, 3, 6, pipeline=2, schedule="interleaved_1f1b", virtual_stages=3, recompute="every-2"),
    case("llama deep", 2048, 1, 8, data=2, pipeline=4, tensor=2, sequence=True, zero=1, schedule="gpipe", recompute="selective"),
    case("llama", 4096, 2, 2, data=2, offload=("optimizer",)),
    case("llama", 4096, 1, 2, data=2, zero=3, offload=("optimizer", "parameters")),
    case("llama deep", 2048, 2, 4, pipeline=2, offload=("activations",)),
    case("llama", 2048, 2, 2, data=2, train={"optimizer": "adafactor"}),
    case("llama adapters", 2048, 2, 2, data=2),
    case("olmo2", 2048, 2, 2, tensor=2),
    case("phi3", 2048, 2, 2, data=4, zero=3),
    case("stablelm", 2048, 2, 2, data=2),
    case("starcoder2", 4096, 1, 4, pipeline=2, tensor=2, sequence=True),
    case("granite", 8192, 1, 2, context=2, recompute="full"),
    case("glm4", 2048, 2, 2, data=2, precision="fp16"),
    case("gptj", 2048, 2, 2, data=2, precision="tf32"),
    case("mixtral", 4096, 1, 4, pipeline=2, context=2, expert=2, schedule="zero_bubble"),
    case("mixtral", 1024, 3, 2, data=2, expert=2, tensor=2, sequence=True, zero=2),
    case("olmoe", 2048, 2, 2, data=4, expert=4, zero=1),
    case("qwen2_moe", 2048, 2, 2, data=2, recompute="full"),
    case("gemma2", 4096, 1, 4, pipeline=2, tensor=2, sequence=True),
    case("gemma3", 4096, 2, 2, data=4, zero=3, recompute="every-2"),
    case("modernbert", 2048, 4, 2, data=2),
    case("roberta", 512, 16, 4, pipeline=2, zero=0),
    case("t5", 2048, 2, 2, tensor=2, recompute="full"),
)


@dataclass(frozen=True)
class Compared:
    """A rank: place in the pipeline, counted peak in bytes, its action, and the seconds of the dry run."""

    pipeline: int
    counted: int
    where: str
    seconds: float


def prepared(one: Case, directory: Path) -> tuple[JobSpec, Layout, ModelShape]:
    spec = one.spec(directory)
    shape = read_shape(spec)
    check_job(spec, shape)
    return spec, layout_of(spec, shape), shape


def dry(spec: JobSpec, layout: Layout, shape: ModelShape, pipeline: int) -> Compared:
    """Return the dry run of the first rank at a place of the pipeline."""
    from hpc_mp.train.dry_run.dry_run import dry_run  # imports torch

    placement = place(layout.degrees, "DPCT" if layout.degrees.context > 1 else "DPT", layout.ranks_per_node, layout.rank_map)
    rank = next(at.rank for at in placement.ranks if at.pp == pipeline and at.tp == at.dp == at.cp == 0)
    began = time.perf_counter()
    step = dry_run(spec, shape, placement, rank).step
    return Compared(pipeline, step.peak.bytes, step.peak.where, time.perf_counter() - began)


def places(layout: Layout, every: bool) -> Iterator[int]:
    """Yield the places of a pipeline that are compared: the first and the last, or all."""
    last = layout.degrees.pipeline - 1
    yield from range(last + 1) if every else sorted({0, last})


@click.command()
@click.option("--only", default="", help="compare the layouts whose description has this word")
@click.option("--all-ranks", is_flag=True, help="compare every place of the pipelines")
@click.option("--keep", type=click.Path(path_type=Path, dir_okay=False), help="a JSON file of counts")
def main(only: str, all_ranks: bool, keep: Path | None) -> None:
    ratios, counts = [], json.loads(keep.read_text()) if keep and keep.exists() else {}
    with tempfile.TemporaryDirectory() as directory:
        for one in (one for one in CASES if only in str(one)):
            spec, layout, shape = prepared(one, Path(directory))
            predicted = footprint(layout, shape)
            for at in places(layout, all_ranks):
                name, mine = f"{one} pp={at}: {MODELS[one.model]}", predicted[at]
                real = Compared(*counts[name]) if name in counts else dry(spec, layout, shape, at)
                if keep and name not in counts:
                    counts[name] = astuple(real)
                    keep.write_text(json.dumps(counts))
                ratio = mine.counted / real.counted
                ratios.append((abs(ratio - 1), f"{ratio:.4f} {one} pp={at}"))
                click.echo(f"{ratio:.4f} {mine.counted / 2**30:8.3f} {real.counted / 2**30:8.3f} {one} pp={at}: {real.where}, "
                           f"{real.seconds:.1f} s; {mine}")
    click.echo(f"{sum(error <= 0.03 for error, _ in ratios)} of {len(ratios)} ranks within 3 %; the worst:")
    for _, line in sorted(ratios)[-8:]:
        click.echo(line)


if __name__ == "__main__":
    main()
