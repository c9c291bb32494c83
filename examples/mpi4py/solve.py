"""The heat of a plate by Jacobi's method: ranks of MPI have strips of rows and swap their edges after each sweep."""

import os
from contextlib import suppress
from pathlib import Path

import numpy as np
from mpi4py import MPI

SIZE, SWEEPS, EVERY = 96, 400, 100
SAVED = Path(os.environ.get("HPC_MP_RUN", ".")) / "plate.npz"

world = MPI.COMM_WORLD
rank, ranks = world.rank, world.size
above = rank - 1 if rank else MPI.PROC_NULL
below = rank + 1 if rank + 1 < ranks else MPI.PROC_NULL

plate, done = np.zeros((SIZE, SIZE)), 0
plate[0] = 100.0  # one edge is hot, and the others are cold
if rank == 0 and os.environ.get("HPC_MP_RESUME") and SAVED.exists():
    with np.load(SAVED) as saved:
        plate, done = saved["plate"], int(saved["sweep"])
done = world.bcast(done)
strips = np.array_split(plate, ranks) if rank == 0 else None
own = world.scatter(strips)
grid = np.vstack([own[:1], own, own[:1]])  # a row of each neighbour around the own ones
fixed = [index for index, edge in ((1, rank == 0), (-2, rank == ranks - 1)) if edge]  # rows at the edge of the plate

for sweep in range(done + 1, SWEEPS + 1):
    world.Sendrecv(grid[1], above, recvbuf=grid[-1], source=below)
    world.Sendrecv(grid[-2], below, recvbuf=grid[0], source=above)
    new = grid.copy()
    new[1:-1, 1:-1] = (grid[:-2, 1:-1] + grid[2:, 1:-1] + grid[1:-1, :-2] + grid[1:-1, 2:]) / 4
    new[fixed] = grid[fixed]
    change = world.allreduce(float(np.square(new[1:-1] - grid[1:-1]).sum())) ** 0.5
    grid = new
    if sweep % EVERY == 0:
        strips = world.gather(grid[1:-1])
        if rank == 0:
            np.savez(SAVED.with_suffix(".new.npz"), plate=np.vstack(strips), sweep=sweep)
            os.replace(SAVED.with_suffix(".new.npz"), SAVED)
    if rank == 0 and sweep % 10 == 0:
        print(f"step {sweep} change {change:.6f}", flush=True)
        with suppress(ImportError):
            import hpc_mp

            hpc_mp.log(step=sweep, loss=change)
