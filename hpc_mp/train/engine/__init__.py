"""A step's mathematics: mesh, stages, tensor, pipeline and data axes, optimizer. It knows no job file and no run directory."""
