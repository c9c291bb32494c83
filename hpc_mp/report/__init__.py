"""Pictures of a run as one HTML file, from its run directory alone."""
