"""Small checkpoints, tokenizers and texts for the recipes, made of the Python that runs this: nothing is downloaded.

    python prepare.py gptj opt …

Each folder gets ``model``, as ``save_pretrained`` writes it, and ``data/rows.jsonl``.
"""

import ast
import inspect
import json
import sys
import sysconfig
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any

import tokenizers
import torch
from tokenizers import decoders, models, pre_tokenizers, trainers
from transformers import AutoConfig, AutoModelForCausalLM, AutoModelForMaskedLM, PreTrainedTokenizerFast
from transformers.utils import logging

SPECIAL = {"pad_token": "<pad>", "bos_token": "<s>", "eos_token": "</s>", "mask_token": "<mask>"}
TURNS = ("<|im_start|>", "<|im_end|>")
CHATML = """\
{%- for message in messages %}
{{- '<|im_start|>' + message['role'] + '\\n' }}
{%- if message['role'] == 'assistant' %}{% generation %}{{- message['content'] + '<|im_end|>' }}{% endgeneration %}
{%- else %}{{- message['content'] + '<|im_end|>' }}{%- endif %}
{{- '\\n' }}
{%- endfor %}
{%- if add_generation_prompt %}{{- '<|im_start|>assistant\\n' }}{%- endif %}
"""
VOCABULARY = 1024
FUNCTIONS, MODULES, LONG = 2000, 40, 40_000  # characters of a long document

Row = Mapping[str, Any]


@dataclass(frozen=True)
class Function:
    """A documented function of Python's library: its name with the module's, its first line, and what it does."""

    name: str
    head: str
    purpose: str


def modules() -> Iterator[tuple[str, str]]:
    """Yield the name and the source of the modules of Python's own library, in alphabetical order."""
    for path in sorted(Path(sysconfig.get_paths()["stdlib"]).glob("*.py")):
        yield path.stem, path.read_text(encoding="utf-8")


def functions() -> Iterator[Function]:
    return islice(documented(), FUNCTIONS)


def documented() -> Iterator[Function]:
    for module, source in modules():
        for node in ast.walk(ast.parse(source)):
            if isinstance(node, ast.FunctionDef) and (purpose := ast.get_docstring(node)):
                yield Function(f"{module}.{node.name}", f"def {node.name}({ast.unparse(node.args)}):", purpose.split("\n\n")[0])


def sentences() -> Iterator[Row]:
    return ({"text": " ".join(function.purpose.split())} for function in functions())


def pairs() -> Iterator[Row]:
    return ({"prompt": f"{function.head}\n", "completion": function.purpose} for function in functions())


def chats() -> Iterator[Row]:
    for function in functions():
        yield {"messages": [{"role": "user", "content": f"What does {function.name} do?"},
                            {"role": "assistant", "content": function.purpose}]}


def sources() -> Iterator[Row]:
    return ({"text": source} for _, source in islice(modules(), MODULES))


def long_documents() -> Iterator[Row]:
    return islice(({"text": source} for _, source in modules() if len(source) > LONG), MODULES // 2)


@dataclass(frozen=True)
class Recipe:
    """The rows of a recipe, and its model: the configuration as transformers has it, and the class that makes it."""

    rows: Callable[[], Iterable[Row]]
    config: Mapping[str, Any]
    architecture: Any = AutoModelForCausalLM


DECODER = {"hidden_size": 64, "intermediate_size": 160, "num_hidden_layers": 4, "num_attention_heads": 4,
           "num_key_value_heads": 2, "head_dim": 16}
RECIPES: Mapping[str, Recipe] = {
    "gptj": Recipe(sentences, {
        "model_type": "gptj", "n_embd": 64, "n_layer": 4, "n_head": 4, "rotary_dim": 8, "n_positions": 128}),
    "opt": Recipe(pairs, {
        "model_type": "opt", "hidden_size": 64, "word_embed_proj_dim": 64, "ffn_dim": 256, "num_hidden_layers": 4,
        "num_attention_heads": 4, "max_position_embeddings": 128, "dropout": 0.0}),
    "mixtral": Recipe(sources, {
        "model_type": "mixtral", **DECODER, "num_local_experts": 8, "num_experts_per_tok": 2, "max_position_embeddings": 128}),
    "bert": Recipe(sentences, {
        "model_type": "bert", "hidden_size": 64, "intermediate_size": 256, "num_hidden_layers": 4, "num_attention_heads": 4,
        "max_position_embeddings": 128, "hidden_dropout_prob": 0.0, "attention_probs_dropout_prob": 0.0}, AutoModelForMaskedLM),
    "qwen3": Recipe(chats, {"model_type": "qwen3", **DECODER, "max_position_embeddings": 256, "tie_word_embeddings": True}),
    "gemma3": Recipe(long_documents, {
        "model_type": "gemma3_text", **DECODER, "num_hidden_layers": 6, "sliding_window": 64, "query_pre_attn_scalar": 16,
        "max_position_embeddings": 512}),
}


def tokenizer_of(texts: Iterable[str]) -> PreTrainedTokenizerFast:
    """Return a byte-level BPE, trained on texts, with a chat template."""
    encoder = tokenizers.Tokenizer(models.BPE())
    encoder.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    encoder.decoder = decoders.ByteLevel()
    encoder.train_from_iterator(texts, trainers.BpeTrainer(
        vocab_size=VOCABULARY, special_tokens=[*SPECIAL.values(), *TURNS], show_progress=False,
        initial_alphabet=pre_tokenizers.ByteLevel.alphabet()))
    return PreTrainedTokenizerFast(tokenizer_object=encoder, chat_template=CHATML, **SPECIAL)


def prepare(name: str, folder: Path) -> None:
    """Write ``data`` and ``model`` of a recipe."""
    recipe = RECIPES[name]
    lines = [json.dumps(row) for row in recipe.rows()]
    (folder / "data").mkdir(exist_ok=True)
    (folder / "data" / "rows.jsonl").write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")
    tokenizer = tokenizer_of(json.loads(line).get("text", line) for line in lines)
    config = AutoConfig.for_model(**recipe.config, vocab_size=VOCABULARY, pad_token_id=tokenizer.pad_token_id,
                                  bos_token_id=tokenizer.bos_token_id, eos_token_id=tokenizer.eos_token_id)
    torch.manual_seed(0)
    model = recipe.architecture.from_config(config, dtype=torch.float32)
    model.save_pretrained(folder / "model")
    tokenizer.save_pretrained(folder / "model")
    print(f"{name}: {model.num_parameters():,} parameters in {folder / 'model'}, {len(lines):,} rows in {folder / 'data'}")


def main(names: list[str]) -> None:
    if not names or set(names) - RECIPES.keys():
        sys.exit(f"{inspect.cleandoc(__doc__)}\n\nRecipes: {', '.join(RECIPES)}")
    logging.disable_progress_bar()
    for name in names:
        prepare(name, Path(__file__).parent / name)


if __name__ == "__main__":
    main(sys.argv[1:])
