# Read by job.sbatch before anything else: `. clean-environment.sh [PATTERN…]`. What the submitting shell had is no part of the
# job, whatever sbatch --export says. PATTERN: further variables of Slurm that the job keeps, without SLURM_ in front.
# PATH, LD_LIBRARY_PATH, MODULEPATH, locale and proxies stay: Slurm, modules and the launching interpreter may need them.

# srun takes options from SLURM_*. What names this job, and how the controller is reached (SLURM_CONF), stays.
hpc_mp_kept='JOB_*|JOBID|NODELIST|NNODES|RESTART_COUNT|CLUSTER_NAME|WORKING_CLUSTER|SUBMIT_*|CONF*|JWT|NODE_ALIASES|TOPOLOGY_ADDR*|SPANK_*|OVERLAP'
for hpc_mp_name; do hpc_mp_kept+="|$hpc_mp_name"; done
for hpc_mp_name in "${!SLURM_@}"; do
    [[ $hpc_mp_name == SLURM_@($hpc_mp_kept) ]] || unset "$hpc_mp_name"
done
unset hpc_mp_kept hpc_mp_name

# Options again.
unset "${!SRUN_@}" "${!SBATCH_@}" "${!SALLOC_@}"
# Another Python's modules, or a library of the login node, would go before the job's own.
unset LD_PRELOAD BASH_ENV "${!PYTHON@}"
# Settings of the network that were tried in that shell. A site's own belong in slurm.modules, slurm.setup or environment.set.
unset "${!NCCL_@}" "${!RCCL_@}" "${!GLOO_@}" "${!UCX_@}" "${!FI_@}" "${!RDMAV_@}"
# The same for the libraries of the ranks.
unset "${!TORCH@}" "${!PYTORCH_@}" "${!TRITON_@}" "${!HF_@}" "${!TRANSFORMERS_@}" "${!TOKENIZERS_@}"
# They would hide GPUs from ranks, or slow them down. In the ranks' step Slurm sets its own.
unset "${!CUDA_@}" "${!HIP_@}" ROCR_VISIBLE_DEVICES ZE_AFFINITY_MASK GPU_DEVICE_ORDINAL
# Threads of a login shell.
unset "${!OMP_@}" "${!GOMP_@}" "${!KMP_@}" "${!MKL_@}" "${!OPENBLAS_@}"
# What another launcher told its ranks.
unset "${!OMPI_@}" "${!PMI@}" "${!PALS_@}" RANK WORLD_SIZE LOCAL_RANK LOCAL_WORLD_SIZE NODE_RANK GROUP_RANK MASTER_ADDR MASTER_PORT
unset "${!HPC_MP_@}"

# sbatch --export=NONE may leave these out.
export PATH USER="${USER:-$(id -un)}" HOME="${HOME:-$(getent passwd "$UID" | cut -d: -f6)}"
