"""The pipeline: the interface of its stages, their activations, and the execution of a schedule."""
