"""Draining of a node. The health check is packed with this file, so it needs only the standard library."""

from hpc_mp.base.command import CommandFailed, Runner
from hpc_mp.cluster.slurm.records import show_records


def drain(node: str, reason: str, ask: Runner) -> str:
    """Drain a node, unless it is already drained: the existing reason stays. Return what was done, in words."""
    try:
        record = next(iter(show_records("node", node, ask)), {})
        if "DRAIN" in record.get("State", ""):
            return f"{node} is already drained"
        ask(("scontrol", "update", f"NodeName={node}", "State=DRAIN", f"Reason={reason}"))
    except CommandFailed as error:
        return f"{node} could not be drained: {error}"
    return f"{node} is drained: {reason}"


def drain_command(node: str, reason: str) -> str:
    """Return the same as a command for an administrator's shell. ``reason`` must contain no quote."""
    return f"scontrol update NodeName={node} State=DRAIN Reason='{reason}'"
