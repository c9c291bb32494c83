"""``[lora]``: the adapters that a job trains in place of the model's own weights."""

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.job import values


class Lora(values.Section):
    """Adapters of low rank beside projections. With them the model's own weights keep their values: they have no gradients, no
    optimizer state, and no place in checkpoints. See [LoRA](../user/lora.md)."""

    rank: values.NonNegative = 0
    """The rank of every adapter; 0: all weights of the model are trained. Example: `16`."""
    alpha: values.Positive | None = None
    """The strength: what an adapter adds is multiplied by alpha / rank. Default: the rank. Example: `32`."""
    modules: tuple[values.Line, ...] = ("*",)
    """The projections of blocks that have an adapter: patterns (`*`, `?`) of Hugging Face's names, or of the ends of names. Those
    of experts are parameters, such as `experts.gate_up_proj`. Example: `["q_proj", "v_proj", "layers.1?.mlp.*"]`."""
    dropout: values.Share = 0.0
    """The probability with which elements of an adapter's input are dropped. Refused for adapters of experts, as in PEFT."""
    rslora: bool = False
    """Multiply by alpha / sqrt(rank) instead."""
    pretrained: values.PathName | None = None
    """A directory with adapters in PEFT's format, from which training begins. Rank, alpha, modules and rslora are then those of
    its `adapter_config.json`. Example: `"adapters"`."""


def check_lora(lora: Lora) -> None:
    """Check that no key is without effect. Raises HpcMpError."""
    defaults = Lora.model_fields
    stated = [name for name in ("alpha", "modules", "rslora", "dropout") if getattr(lora, name) != defaults[name].default]
    if lora.pretrained is None and lora.rank == 0 and stated:
        raise HpcMpError(f"lora.{stated[0]} = {shown(getattr(lora, stated[0]))}", "has no effect without lora.rank",
                         f"set lora.rank, or leave {stated[0]} out")
    read = [name for name in ("rank", *stated) if getattr(lora, name) and name != "dropout"]
    if lora.pretrained is not None and read:
        raise HpcMpError(f"lora.{read[0]} = {shown(getattr(lora, read[0]))}", "has no effect beside lora.pretrained, whose "
                         "adapter_config.json decides it", f"leave one of {read[0]} and pretrained out")
