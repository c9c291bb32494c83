"""Environment variables of NCCL, InfiniBand and PyTorch: values and their sources, needs of platforms, harmful settings."""
