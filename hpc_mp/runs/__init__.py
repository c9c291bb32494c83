"""Operations on existing runs: lookup, status, logs, cancel, prune. What makes a run is in ``launch``."""
