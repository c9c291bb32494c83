"""What a layout needs and how fast it will run, from a model's shape alone. First: memory of model state."""

from hpc_mp.planner.memory import StateBytes, state_bytes

__all__ = ["StateBytes", "state_bytes"]
