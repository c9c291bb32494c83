"""The checks of one machine: pure functions from facts to findings, in tables."""
