"""Launch of job files and operations on runs: plan, script, back ends, staging, status, logs, cancel, `hpc_mp.submit`."""
