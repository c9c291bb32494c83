"""hpc-mp: train Hugging Face models too big for one GPU on a Slurm cluster."""

__version__ = "0.1.0"
