"""The device of a rank: number formats, profiler spans, and the readback of numbers to the host."""
