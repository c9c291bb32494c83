"""The optimizer, and the homes of its state."""
