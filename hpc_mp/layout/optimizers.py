"""Facts about optimizers that layouts and their checks depend on."""

from collections.abc import Sequence
from fnmatch import fnmatchcase

VECTORS = "vectors"  # stands for all parameters of one dimension among patterns of names
SLOTS = {"adamw": 2, "muon": 2, "sgd": 0, "adafactor": 0}  # numbers of optimizer state per parameter; momentum is one more
WHOLE_WEIGHTS = frozenset({"adafactor", "muon"})  # optimizers that update whole weights, see ``owners``


def has_no_decay(name: str, shape: Sequence[int], patterns: Sequence[str]) -> bool:
    """Return whether a parameter has no weight decay, by ``train.no_decay``. ``shape``: in the model's module."""
    return (len(shape) < 2 and VECTORS in patterns) or any(fnmatchcase(name, pattern) for pattern in patterns)
