"""``--on slurm`` or ``auto`` inside an allocation: the job script runs as a step of that allocation."""

import os
from dataclasses import replace

from hpc_mp.cluster.slurm.allocation import step_environment
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.releases import Version
from hpc_mp.job import AnySpec
from hpc_mp.launch.backends.backend import Launch
from hpc_mp.launch.backends.supervised import follow
from hpc_mp.launch.choices import slurm_gpus
from hpc_mp.launch.facts import ClusterFacts, ask_cluster
from hpc_mp.launch.model_check import check_model
from hpc_mp.launch.plan import Target
from hpc_mp.launch.run_files import begin
from hpc_mp.launch.staging.archive import stage_environment
from hpc_mp.rundir.outcome import Outcome


def _facts(spec: AnySpec, release: Version | None) -> ClusterFacts:
    nodes = tuple(expand(os.environ.get("SLURM_JOB_NODELIST", "")))
    return replace(ask_cluster(spec, release), cpus=None, allocation=nodes)  # the allocation may have fewer CPUs than its nodes


TARGET = Target("in this allocation", _facts, slurm_gpus, in_script=True)


def start(launch: Launch) -> Outcome:
    """Run the script in the allocation that ``SLURM_JOB_ID`` names, to its end. Raises HpcMpError if the run directory cannot be
    written."""
    launch.check(check_model)
    job_id = os.environ["SLURM_JOB_ID"]
    with begin(launch.plan, launch.resumed) as begun:
        stage_environment(launch.plan.spec, launch.listener, begun.run)
        script, log = str(begun.run.script), begun.run.slurm_log(job_id)
        return follow(["bash", script], step_environment(), log, begun, launch, job_id)
