"""hpc_mp.submit: Python callables as jobs."""
