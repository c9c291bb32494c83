"""Trees of machines."""
