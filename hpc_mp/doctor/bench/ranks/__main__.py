"""``python -m hpc_mp.doctor.bench.ranks SPEC``: one rank, as srun or mpirun starts it."""

import sys

from hpc_mp.doctor.bench.ranks.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
