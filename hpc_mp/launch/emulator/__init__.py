"""Ranks of emulated nodes on this machine, forked from one process that has imported their modules."""
