"""The device of a rank: number formats, names for its profiler, and numbers on their way to the host."""
