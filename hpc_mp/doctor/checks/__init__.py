"""Checks of one machine: tables of pure functions from facts to findings."""
