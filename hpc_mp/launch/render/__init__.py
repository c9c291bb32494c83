"""The rendering of a job script: a template, filled in from a job file and explained line by line."""

from hpc_mp.launch.render.script import JobScript, ScriptTemplate, check_sweep, find_template, render, site_defaults
from hpc_mp.launch.render.values import slurm_log

__all__ = ["JobScript", "ScriptTemplate", "check_sweep", "find_template", "render", "site_defaults", "slurm_log"]
