"""Benchmark of collectives between ranks, timed as in nccl-tests and compared with the fabric's expected bandwidth."""
