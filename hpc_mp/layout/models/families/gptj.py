"""GPT-J: attention and MLP side by side behind one norm, rotary positions on a part of each head, a biased head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import gpt2
from hpc_mp.layout.models.family import Weight, column, norm, row
from hpc_mp.layout.models.fields import OLDER, READ, ConfigField
from hpc_mp.layout.models.shape import ModelShape, count, read_sizes

FIELDS = {
    **gpt2.SHARED,
    "rotary_dim": READ,
    # Fields that the first checkpoints of this family also contain; transformers does the first two always.
    **dict.fromkeys(("rotary", "scale_attn_weights"),
                    ConfigField(lambda value: value is True, "is not supported yet", "leave it out", in_job=False)),
    **dict.fromkeys(gpt2.SUMMARY, OLDER),
}
DEFAULT = replace(gpt2.DEFAULT, model_type="gptj", layers=28, hidden=4096, heads=16, vocabulary=50400, positions=2048,
                  tied=False, attention_bias=False)  # of transformers' GPTJConfig (the 6 B model)


def read(config: Mapping[str, Any]) -> ModelShape:
    shape = read_sizes(config, DEFAULT, gpt2.OWN)
    rotary = 0 if config.get("rotary_dim", 64) is None else count(config, "rotary_dim", 64)
    if rotary % 2 or not 0 < rotary <= shape.head_dim:
        raise HpcMpError(f"the model's rotary_dim({rotary or 'null'})",
                         f"must be even and from 2 to the size of a head, n_embd / n_head = {shape.head_dim}",
                         f"write rotary_dim = {shape.head_dim} to rotate whole heads")
    return shape


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    return (
        *norm("ln_1", h, bias=True),
        *(weight for name in "qkv" for weight in column(f"attn.{name}_proj", h, h)),
        *row("attn.out_proj", h, h),
        *column("mlp.fc_in", f, h, bias=True),
        *row("mlp.fc_out", h, f, bias=True),
    )


FAMILY = replace(
    gpt2.FAMILY,
    model_type="gptj", architecture="GPTJForCausalLM", since="5.24",
    fields=FIELDS, read=read,
    lookups={}, rotary=("transformer.rotary_emb",),
    attention_dropout=None, transposed=False,
    block_weights=block_weights,
    embedding_weights=lambda s: column("transformer.wte", s.vocabulary, s.hidden),
    head_weights=lambda s: column("lm_head", s.vocabulary, s.hidden, bias=True),
    older_names={},
)
