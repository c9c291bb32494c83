"""``hpc_mp.parallel``: the engine in a user's own training loop."""
