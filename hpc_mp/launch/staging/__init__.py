"""Files and the Python environment copied to the nodes before the ranks start."""
