"""The pipeline: what its stages are, and the order of their actions."""
