"""Description of an existing Slurm cluster, and rules on settings that are wrong for training."""
