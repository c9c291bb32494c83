"""Azure CycleCloud: what Azure offers, and the files of a cluster made of it."""
