"""Pictures and HTML from a run directory."""
