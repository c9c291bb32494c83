"""Launch of job files: plan, script, back ends, staging, `hpc_mp.run_job`, `hpc_mp.submit`."""
