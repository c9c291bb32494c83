"""The program of a rank: meet the other ranks, measure every size, let rank 0 print the results.

srun and survey agents start it: ``python -m hpc_mp.doctor.bench.ranks.program SPEC``, a specification as a line of JSON.
"""

import os
import platform
import socket
import sys
from pathlib import Path
from typing import TYPE_CHECKING

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.ranks.measure import allocate, measure
from hpc_mp.doctor.bench.spec import ELEMENT, BenchSpec, Voice, load_spec
from hpc_mp.planner.collectives import COLLECTIVES, PLACED, Collective

if TYPE_CHECKING:
    from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork


def forked(path: Path) -> int:
    """Run a rank of the emulator, which passes the specification in a file."""
    return run(load_spec(path.read_text(encoding="utf-8")))


def run(spec: BenchSpec) -> int:
    """Run the measurement and return the exit code: 2 if this rank finds the input wrong."""
    voice = Voice()
    try:
        network = _connect(spec, voice)
    except HpcMpError as error:
        voice.say("refused", value=error.value, rule=error.rule, remedy=error.remedy)
        return 2
    introduce(network, spec, voice)
    for size in spec.sizes:
        measure_size(network, spec, size, voice)
    if network.rank == 0:
        voice.say("end")
    network.barrier()
    network.close()
    return 0


def _connect(spec: BenchSpec, voice: Voice) -> "TorchNetwork":
    from hpc_mp.doctor.bench.ranks.torch_network import TorchNetwork, meet

    return TorchNetwork(spec, *meet(spec, voice, os.environ, sys.stdin))


def introduce(network: "TorchNetwork", spec: BenchSpec, voice: Voice) -> None:
    """Print the event ``ranks`` on rank 0."""
    records = network.gather({
        "rank": network.rank, "group": spec.group_of(network.rank), "pid": os.getpid(),
        "host": os.environ.get("SLURMD_NODENAME") or socket.gethostname(),
        "device": network.rank % spec.ranks_per_node, "name": network.device if network.device != "cpu" else platform.machine(),
    })
    if records is not None:
        voice.say("ranks", ranks=records, versions=network.versions)


def measure_size(network: "TorchNetwork", spec: BenchSpec, size: int, voice: Voice) -> None:
    """Measure both placements; rank 0 prints the measurements of all ranks."""
    collective: Collective = COLLECTIVES[spec.collective]
    if network.rank == 0:
        voice.say("size", size=size)
    counts = collective.counts(size, network.members, ELEMENT[spec.dtype])
    buffers = allocate(network, counts)
    samples = {placed: measure(network, collective, counts, buffers, placed, spec.warmup, spec.iterations, spec.check)
               for placed in PLACED}
    results = network.gather(samples)
    if results is not None:
        voice.say("row", size=size, ranks=results)


if __name__ == "__main__":
    sys.exit(run(load_spec(sys.argv[1])))
