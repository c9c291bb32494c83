"""The types of causal language models, and whether each of them is verified: a table that tests prove. No torch."""

from dataclasses import dataclass

from hpc_mp.base.assets import asset_table
from hpc_mp.layout.models import FAMILIES

TABLE = "env/model-types.toml"


@dataclass(frozen=True, slots=True)
class TypeVerdict:
    """The verdict on a type."""

    model_type: str
    verified: bool  # True if it equals plain transformers on all layouts that tests try
    table: bool  # True if it has a table here; the code of others is read from transformers
    reason: str  # why it is refused; empty if it is not


def proved_with() -> str:
    """Return the release of transformers that the verdicts hold for."""
    return str(asset_table(TABLE)["transformers"])


def verdicts() -> tuple[TypeVerdict, ...]:
    """Return the verdict on every type, in the order of their names."""
    types = asset_table(TABLE)
    accepted = {*types["verified"], *FAMILIES}
    by_name = {name: TypeVerdict(name, True, name in FAMILIES, "") for name in accepted}
    by_name |= {name: TypeVerdict(name, False, False, reason) for name, reason in types["refused"].items()}
    return tuple(by_name[name] for name in sorted(by_name))
