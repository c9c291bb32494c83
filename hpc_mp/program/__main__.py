"""``python -m hpc_mp.program RUN``: a rank, as srun starts it."""

import sys
from pathlib import Path

from hpc_mp.program.rank import main

if __name__ == "__main__":
    sys.exit(main(Path(sys.argv[1])))
