"""Checkpoints of sharded state, their publication, and the export to Hugging Face."""
