"""``python -m hpc_mp.doctor.bench.ranks SPEC``: one rank, started by srun or mpirun."""

import sys

from hpc_mp.doctor.bench.ranks.program import main

if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
