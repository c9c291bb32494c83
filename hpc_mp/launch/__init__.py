"""Starting a run: render, submit, emulate, watch."""
