"""Does `hpc-mp bench` report what an independently timed torch.distributed loop finds, on loopback?

First the two take turns inside the same gloo ranks, on the same buffers; then the whole command takes turns with a program of
its own (this file with --plain). Printed are ratios of neighbours, and of a loop to itself (A/A).
"""

import argparse
import json
import os
import socket
import subprocess
import sys
import time
import warnings
from collections.abc import Callable
from statistics import median, quantiles
from typing import Any

NAMES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "broadcast", "sendrecv")
IN_PLACE = ("all_reduce", "broadcast")  # torch offers these in place alone
WARM_UP, ITERATIONS = 5, 20  # those of `hpc-mp bench`


def operation(name: str, send: Any, receive: Any, rank: int, ranks: int, other: Any) -> Callable[[], Any]:
    """In torch's own words, nothing of hpc-mp's. ``other``: a second group, for what odd ranks send."""
    import torch.distributed as dist

    def exchange() -> None:
        here, there = (other, None) if rank % 2 else (None, other)
        before = there if ranks % 2 == 0 else (other if (rank - 1) % ranks % 2 else None)
        works = [dist.isend(send, (rank + 1) % ranks, group=here), dist.irecv(receive, (rank - 1) % ranks, group=before)]
        for work in works:
            work.wait()

    return {
        "all_reduce": lambda: dist.all_reduce(receive), "broadcast": lambda: dist.broadcast(receive, 0),
        "all_gather": lambda: dist.all_gather_into_tensor(receive, send),
        "reduce_scatter": lambda: dist.reduce_scatter_tensor(receive, send),
        "all_to_all": lambda: dist.all_to_all_single(receive, send), "sendrecv": exchange,
    }[name]


def loop(run: Callable[[], Any]) -> float:
    """Seconds per operation."""
    import torch.distributed as dist

    for _ in range(WARM_UP):
        run()
    dist.barrier()
    began = time.perf_counter()
    for _ in range(ITERATIONS):
        run()
    return (time.perf_counter() - began) / ITERATIONS


def fork_ranks(ranks: int, function: Callable[[int], Any]) -> Any:
    """What ``function`` returns on rank 0, of ``ranks`` processes that can reach each other."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free.getsockname()[1]), "GLOO_SOCKET_IFNAME": "lo"}
    read, write = os.pipe()
    children = []
    for rank in range(ranks):
        children.append(os.fork())
        if children[-1] == 0:
            warnings.simplefilter("ignore", FutureWarning)  # torch has new names for two operations
            answer = json.dumps(function(rank)).encode()
            if rank == 0:
                os.write(write, answer)
            os._exit(0)
    os.close(write)
    with os.fdopen(read) as pipe:
        found = pipe.read()
    if any(os.waitpid(child, 0)[1] for child in children):
        sys.exit("a rank failed")
    return json.loads(found)


def side_by_side(name: str, size: int, ranks: int, rounds: int, rank: int) -> list[list[float]]:
    """Of each round: seconds of the loop, of ``hpc-mp bench``, and of the loop again, on the same buffers."""
    import torch.distributed as dist

    from hpc_mp.doctor.bench.ranks.program import allocate, measure
    from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork
    from hpc_mp.doctor.bench.spec import BenchSpec
    from hpc_mp.planner.collectives import COLLECTIVES
    from hpc_mp.rundir.rank_env import RankEnv
    from hpc_mp.train.rank.rendezvous import Rendezvous

    spec = BenchSpec(name, "gloo", 1, ranks, (tuple(range(ranks)),), (size,))
    port = int(os.environ["MASTER_PORT"])
    network = TorchNetwork(spec, RankEnv(rank, ranks, rank, "here", "bench_check"), Rendezvous("127.0.0.1", port, "check"))
    this = COLLECTIVES[name]
    counts = this.counts(size, ranks, 4)
    buffers = allocate(network, counts)
    placed = "in_place" if name in IN_PLACE else "out_of_place"
    run = operation(name, *buffers.views(this, counts, placed, rank), rank, ranks, dist.new_group())
    found = []
    for _ in range(rounds):
        first = loop(run)
        ours = measure(network, this, counts, buffers, placed, WARM_UP, ITERATIONS, check=False).mean  # type: ignore[arg-type]
        found.append([first, ours, loop(run)])
    return found


def plain(name: str, size: int, ranks: int, rank: int) -> float:
    """Seconds per operation, in a program that does nothing else."""
    import torch
    import torch.distributed as dist

    torch.set_num_threads(1)
    dist.init_process_group("gloo", rank=rank, world_size=ranks)
    part = size // 4 // ranks
    whole = {"all_gather": (part, part * ranks), "reduce_scatter": (part * ranks, part)}.get(name, (size // 4,) * 2)
    send, receive = (torch.ones(length) for length in whole)
    run = operation(name, send, receive, rank, ranks, dist.new_group())
    return median(loop(run) for _ in range(10))


def command(name: str, size: int, ranks: int) -> float:
    done = subprocess.run([sys.executable, "-m", "hpc_mp", "bench", name, "--on", "local", "--backend", "gloo", "--nodes", "1",
                           "--ranks-per-node", str(ranks), "-b", str(size), "-e", str(size), "-n", "60", "--json"],
                          capture_output=True, text=True, check=True)
    (result,) = json.loads(done.stdout)["results"]
    return float(result[f"{'in_place' if name in IN_PLACE else 'out_of_place'}_per_iter"]["p50_us"]) / 1e6


def program(name: str, size: int, ranks: int) -> float:
    done = subprocess.run([sys.executable, __file__, "--plain", name, "--size", str(size), "--ranks", str(ranks)],
                          capture_output=True, text=True, check=True)
    return float(done.stdout)


def show(name: str, size: int, found: list[list[float]]) -> None:
    """Of triples (loop, ours, loop): how many times the loop's bandwidth ours is, and that of a loop to its neighbour."""
    ours = [(before + after) / 2 / mine for before, mine, after in found]
    same = [before / after for before, _, after in found]
    print(f"{name:15} {size // 1024:6} KiB   bench / loop {_spread(ours)}   loop / loop {_spread(same)}", flush=True)


def _spread(ratios: list[float]) -> str:
    low, middle, high = quantiles(ratios, n=4)
    return f"{middle:5.3f} ({low:4.2f} to {high:4.2f})"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--plain", choices=NAMES, help=argparse.SUPPRESS)
    parser.add_argument("--name", choices=NAMES, action="append", help="only these (repeatable)")
    parser.add_argument("--size", type=int, action="append", help="bytes (repeatable); default 1048576, 8388608")
    parser.add_argument("--ranks", type=int, default=2)
    parser.add_argument("--rounds", type=int, default=40)
    arguments = parser.parse_args()
    names, sizes, ranks = arguments.name or NAMES, arguments.size or [2**20, 2**23], arguments.ranks
    if arguments.plain:
        print(fork_ranks(ranks, lambda rank: plain(arguments.plain, sizes[0], ranks, rank)))
        return
    print(f"{ranks} gloo ranks; busbw of `hpc-mp bench` relative to the loop's: medians and quartiles\n\n"
          f"same ranks and buffers, {arguments.rounds} rounds")
    for name in names:
        for size in sizes:
            found = fork_ranks(ranks, lambda rank, name=name, size=size: side_by_side(name, size, ranks, arguments.rounds, rank))
            show(name, size, found)
    turns = max(4, arguments.rounds // 10)
    print(f"\nthe command and a program of its own, {turns} turns")
    for name in names:
        before, found = program(name, sizes[-1], ranks), []
        for _ in range(turns):
            mine = command(name, sizes[-1], ranks)
            after = program(name, sizes[-1], ranks)
            found.append([before, mine, after])
            before = after
        show(name, sizes[-1], found)


if __name__ == "__main__":
    main()
