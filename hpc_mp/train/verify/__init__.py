"""Verification of a job: its model and its layout, shrunk, against Hugging Face's own model in one process."""
