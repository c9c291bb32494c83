"""Environment variables of NCCL, InfiniBand and PyTorch: what is set, by whom, what a platform needs, and what hurts."""
