"""Qwen2 and Qwen2.5: Llama's blocks, in which q, k and v have biases and no other projection has one."""

from dataclasses import replace

from hpc_mp.layout.models.families import llama
from hpc_mp.layout.models.family import Weight
from hpc_mp.layout.models.fields import READ, ConfigField, only
from hpc_mp.layout.models.shape import ModelShape

FULL = "every token then sees all earlier ones"
FIELDS = {
    **llama.SHARED,
    "use_sliding_window": only(False, remedy=f"leave it out, or set it to false: {FULL}"),
    "layer_types": ConfigField(lambda value: value is None or set(value) == {"full_attention"}, "is not supported yet",
                               f"leave it out, or set full_attention for every layer: {FULL}"),
    **dict.fromkeys(("sliding_window", "max_window_layers"), READ),  # without effect unless use_sliding_window is set
    "use_mrope": only(False),
}
DEFAULT = replace(llama.DEFAULT, model_type="qwen2", kv_heads=32, intermediate=22016, vocabulary=151936, positions=32768,
                  attention_bias=True)  # of transformers' Qwen2Config


def block_weights(s: ModelShape, layer: int) -> tuple[Weight, ...]:
    return tuple(weight for weight in llama.block_weights(s, layer) if weight.name != "self_attn.o_proj.bias")


FAMILY = replace(
    llama.FAMILY,
    model_type="qwen2", architecture="Qwen2ForCausalLM",
    fields=FIELDS, read=lambda config: llama.read_decoder(config, DEFAULT),
    block_weights=block_weights,
)
