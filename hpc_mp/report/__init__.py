"""Figures of a run as one HTML file, drawn only from its run directory."""
