"""A step of the optimizer, from its microbatches to its numbers."""
