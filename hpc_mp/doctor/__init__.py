"""Diagnosis of bad nodes and links: node checks, cluster survey, localiser, bandwidth and compute benchmarks."""
