"""Description of an existing Slurm cluster, and of its settings that are wrong for training."""
