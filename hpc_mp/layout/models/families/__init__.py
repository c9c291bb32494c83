"""One file for each model family; its ``FAMILY`` is the table."""
