"""Slurm: the only room that starts its programs and reads what they print."""
