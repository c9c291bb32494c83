"""Which node or link is bad: node checks, bandwidth, the localiser, and what follows from their verdicts."""
