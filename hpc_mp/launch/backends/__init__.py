"""How a plan is started and followed: on emulated nodes, through Slurm, through mpirun."""
