"""The rank half: what every rank runs, from text to checkpoints."""
