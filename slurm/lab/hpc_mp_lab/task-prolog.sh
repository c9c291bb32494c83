#!/bin/bash
# Slurm's TaskProlog of a cluster whose nodes have a share of the machine's cores, fewer than Slurm believes: a rank gets no more
# threads than the cores of its node have room for (nproc believes OMP_NUM_THREADS). What is printed becomes the task's environment.
share=$(($(env -u OMP_NUM_THREADS nproc) / ${SLURM_NTASKS_PER_NODE:-1}))
share=$((share > 0 ? share : 1))
if [[ ${OMP_NUM_THREADS:-} =~ ^[0-9]+$ ]] && ((OMP_NUM_THREADS > share)); then
    echo "export OMP_NUM_THREADS=$share"
fi
