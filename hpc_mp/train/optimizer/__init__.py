"""The optimizer, and the places of its state."""
