"""Staging: files and the Python environment are copied to the nodes before the ranks start."""
