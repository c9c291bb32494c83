"""``python -m hpc_mp`` is ``hpc-mp``."""

from hpc_mp.cli.main import main

if __name__ == "__main__":
    main()
