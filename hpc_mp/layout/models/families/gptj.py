"""GPT-J: attention and MLP side by side behind one norm, rotary positions on a part of each head, a biased head."""

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.layout.models.families import gpt2
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, ConfigField
from hpc_mp.layout.models.shape import ConfigReader, ModelShape

FIELDS: Mapping[str, ConfigField] = {
    **gpt2.SHARED,
    "rotary_dim": READ,
    # Fields that the first checkpoints of this family also contain; transformers does the first two always.
    **dict.fromkeys(("rotary", "scale_attn_weights"),
                    ConfigField(lambda value: value is True, "is not supported yet", "leave it out", in_job=False)),
    **dict.fromkeys(gpt2.SUMMARY, ConfigField(in_job=False)),
}


def read(config: Mapping[str, Any]) -> ModelShape:
    """Read the shape. Defaults: transformers' GPTJConfig (the 6 B model)."""
    shape = gpt2.read_gpt(config, "gptj", hidden=4096, heads=16, layers=28, vocabulary=50400, positions=2048, tied=False,
                          attention_bias=False)
    rotary = 0 if config.get("rotary_dim", 64) is None else ConfigReader(config).count("rotary_dim", default=64)
    if rotary % 2 or not 0 < rotary <= shape.head_dim:
        raise HpcMpError(f"the model's rotary_dim({rotary or 'null'})",
                         f"must be even and from 2 to the size of a head, n_embd / n_head = {shape.head_dim}",
                         f"write rotary_dim = {shape.head_dim} to rotate whole heads")
    return shape


def block_weights(s: ModelShape, _: int) -> tuple[Weight, ...]:
    h, f = s.hidden, s.intermediate
    return (
        Weight("ln_1.weight", (h,), init="ones"),
        Weight("ln_1.bias", (h,), init="zeros"),
        *(Weight(f"attn.{name}.weight", (h, h), cut=0) for name in ("q_proj", "k_proj", "v_proj")),
        Weight("attn.out_proj.weight", (h, h), cut=1),
        Weight("mlp.fc_in.weight", (f, h), cut=0),
        Weight("mlp.fc_in.bias", (f,), cut=0, init="zeros"),
        Weight("mlp.fc_out.weight", (h, f), cut=1),
        Weight("mlp.fc_out.bias", (h,), init="zeros"),
    )


FAMILY = replace(
    gpt2.FAMILY,
    model_type="gptj",
    architecture="GPTJForCausalLM",
    modules=("transformers.models.gptj.modeling_gptj",),
    fields=FIELDS,
    read=read,
    lookups={},
    rotary="transformer.rotary_emb",
    attention_dropout=None,
    projections={
        "attn.q_proj": "column", "attn.k_proj": "column", "attn.v_proj": "column", "attn.out_proj": "row",
        "mlp.fc_in": "column", "mlp.fc_out": "row",
    },
    transposed=False,
    since="5.24",
    block_weights=block_weights,
    embedding_weights=lambda s: (Weight("transformer.wte.weight", (s.vocabulary, s.hidden), cut=0),),
    head_weights=lambda s: (
        Weight("lm_head.weight", (s.vocabulary, s.hidden), cut=0),
        Weight("lm_head.bias", (s.vocabulary,), cut=0, init="zeros"),
    ),
    checkpoint_prefixes=(),
)
