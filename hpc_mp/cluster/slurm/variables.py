"""Environment variables that a scheduler or a launcher sets for its own ranks."""

import re

# What a scheduler or another launcher left around us says nothing about our ranks.
FOREIGN = re.compile(r"SLURM_|SLURMD_|SRUN_|PMI|OMPI_|PALS_|TORCHELASTIC_|"
                     r"HPC_MP_(EMULATED|LISTEN_FD|TOKEN|MPI|LOCAL|STAGED|RUN)$|"
                     r"(RANK|WORLD_SIZE|LOCAL_RANK|LOCAL_WORLD_SIZE|NODE_RANK|GROUP_RANK|MASTER_ADDR|MASTER_PORT)$")
