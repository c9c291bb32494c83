"""Facts about optimizers that layouts and their checks depend on."""

SLOTS = {"adamw": 2, "muon": 2, "sgd": 0, "adafactor": 0}  # numbers of optimizer state per parameter; momentum is one more
WHOLE_WEIGHTS = frozenset({"adafactor", "muon"})  # optimizers that update whole weights, see ``owners``
