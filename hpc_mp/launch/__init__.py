"""From a job file to running ranks and back to words: plan, render, back ends, staging, status, logs, cancel, `hpc_mp.submit`."""
