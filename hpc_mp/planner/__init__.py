"""What a layout costs: memory, traffic, collectives and fabrics; and which orders of ranks and hosts cost least."""

from hpc_mp.planner.memory import StateBytes, state_bytes

__all__ = ["StateBytes", "state_bytes"]
