"""Rendering of a directory for CycleCloud from a size and a number of nodes: ``hpc-mp cloud render``."""
