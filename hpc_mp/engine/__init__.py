"""What every rank runs: mesh, tensor, pipeline and ZeRO parallelism, checkpoints, the train loop."""
