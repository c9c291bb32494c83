"""Allowed settings of rotary positions: the kinds that transformers computes, and the numbers that each kind needs.

Source: ``modeling_rope_utils.py`` of transformers. It accepts an unknown kind, and text in place of a number, and fails when the
model is built.
"""

from collections.abc import Mapping
from typing import Any

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import shown
from hpc_mp.layout.models.fields import POSITIVE, READ, ConfigField, Fields, is_number, number, only

# kind -> required settings
NEEDED: Mapping[str, tuple[str, ...]] = {
    "default": (),
    "linear": ("factor",),
    "dynamic": ("factor",),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
}
WITH_HEAD_DIM = ("dynamic", "yarn", "longrope")  # computed from head_dim as stated, even if a family has null for it
LISTS = ("short_factor", "long_factor")  # a number for each pair of rotated elements
PART = only(None, 1.0, remedy="leave it out: positions rotate whole heads")
ABOVE_ZERO = ConfigField(lambda value: is_number(value) and value > 0, POSITIVE.rule, POSITIVE.remedy)  # and not null
SETTINGS: Fields = {
    **dict.fromkeys(("attention_factor", "beta_fast", "beta_slow", "high_freq_factor", "low_freq_factor", "mscale",
                     "mscale_all_dim"), number("a number", lambda value: True)),
    **dict.fromkeys(("factor", "original_max_position_embeddings", "rope_theta"), ABOVE_ZERO),
    **dict.fromkeys(("rope_type", "type", "truncate"), READ),
}
ROTARY_FIELDS: Fields = {
    "rope_parameters": READ,
    "rope_scaling": READ,  # the same setting in older releases, with rope_theta beside it
    "rope_theta": POSITIVE,
    "partial_rotary_factor": PART,
}


def check_rotary(config: Mapping[str, Any], head_dim: int, derived: bool = True, part: bool = False) -> None:
    """Check that transformers can compute the settings of rotary positions. Raises HpcMpError.

    Args:
        head_dim: number of rotated elements of a head.
        derived: True if the family's configuration class computes a missing ``head_dim``.
        part: True if the family may rotate a part of each head.
    """
    if head_dim % 2:
        raise HpcMpError(f"the model's heads of {head_dim} elements", "cannot be rotated in pairs of elements",
                         "choose sizes that make it an even number")
    factors = ConfigField(lambda value: value is None or (
        isinstance(value, list | tuple) and len(value) == head_dim // 2 and all(map(is_number, value))),
        f"must be a list of {head_dim // 2} numbers, one for each pair of rotated elements",
        "use the list of the model's own config.json")
    fields = SETTINGS | dict.fromkeys(LISTS, factors) | {"partial_rotary_factor": READ if part else PART}
    for field in ("rope_parameters", "rope_scaling"):
        if (settings := config.get(field)) is not None:
            kind = _check(f"the model's {field}", settings, fields)
            if kind in WITH_HEAD_DIM and not derived and config.get("head_dim") is None:
                raise HpcMpError("the model's head_dim", f"is required for rope_type = {shown(kind)}",
                                 f"set head_dim = {head_dim}")


def _check(where: str, settings: Any, fields: Fields) -> str:
    """Check one table of settings, and return its kind."""
    if not isinstance(settings, Mapping):
        raise HpcMpError(f"{where} = {shown(settings)}", "must be a table",
                         'write for example { rope_type = "linear", factor = 2.0 }')
    kind: str = settings.get("rope_type", settings.get("type", "default"))
    if kind not in NEEDED:
        raise HpcMpError(f"{where}: rope_type = {shown(kind)}", "is not a supported kind of rotary positions",
                         f"choose one of {', '.join(NEEDED)}")
    for key in NEEDED[kind]:
        if settings.get(key) is None:
            raise HpcMpError(f"{where}: {key}", f"is required for rope_type = {shown(kind)}", "add it")
    for key, value in settings.items():
        if key not in fields:
            raise HpcMpError(f"{where}: {key} = {shown(value)}", "is not a supported setting of rotary positions", "leave it out")
        if not fields[key].holds(value):
            raise HpcMpError(f"{where}: {key}" + ("" if key in LISTS else f" = {shown(value)}"), fields[key].rule,
                             fields[key].remedy)
    return kind
