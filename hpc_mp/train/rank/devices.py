"""The device of a rank, and the check that all ranks' devices match."""

import json
import os
from collections.abc import MutableMapping, Sequence
from contextlib import suppress
from dataclasses import astuple, dataclass
from datetime import timedelta

import torch
import torch.distributed as dist

from hpc_mp.base.assets import asset_table
from hpc_mp.base.errors import HpcMpError
from hpc_mp.rundir.rank_env import RankEnv
from hpc_mp.train.rank.proof import SignedKeys

CPU = "cpu"  # a choice beside the back ends of ranks on GPUs
LATER = timedelta(seconds=10)  # for which rank 0 waits until the others know why all end
NCCL, SHARED = "cpu:gloo,cuda:nccl", "gloo"  # each rank has a GPU of its own; several ranks share one


@dataclass(frozen=True, slots=True)
class Seat:
    """A rank's node, and the UUID of the GPU that it would take; empty: it sees none, or wants none."""

    node: str
    gpu: str = ""


def emulated() -> bool:
    """Return True for a rank of an emulated node; all of them are on one machine."""
    return os.environ.get("HPC_MP_EMULATED") == "1"


def own_gpu(requested: str, who: RankEnv) -> torch.device | None:
    """Return the GPU that this rank would take; None if it sees or wants none. A launcher may show each rank only its own."""
    if requested == CPU:
        return None
    prepare(os.environ)  # before the question, which initialises CUDA
    gpus = torch.cuda.device_count() if torch.cuda.is_available() else 0
    return torch.device("cuda", (who.rank if emulated() else who.local_rank) % gpus) if gpus else None


def seat_of(who: RankEnv, gpu: torch.device | None) -> Seat:
    return Seat(who.node, "" if gpu is None else str(torch.cuda.get_device_properties(gpu).uuid))


def device_choice(requested: str, seats: Sequence[Seat], shares: bool) -> str:
    """Return ``CPU`` or the back end of all ranks: NCCL if their GPUs are distinct, however many of them each rank sees.
    ``requested``: ``job.device``. ``auto`` takes GPUs if every rank sees one. ``shares``: True if ranks may share a GPU, as
    emulated nodes do. Raises HpcMpError if cuda is requested and a rank sees no GPU, or ranks that may not do so share one."""
    blind = list(dict.fromkeys(seat.node for seat in seats if not seat.gpu))
    if requested == CPU or (requested == "auto" and blind):
        return CPU
    if blind:
        raise HpcMpError("job.device = cuda", f"torch {torch.__version__} sees no GPU on {', '.join(blind)}",
                         'install a CUDA build of torch and a driver, or set job.device = "cpu"')
    ranks: dict[str, list[int]] = {}
    for rank, seat in enumerate(seats):
        ranks.setdefault(seat.gpu, []).append(rank)
    gpu, several = max(ranks.items(), key=lambda item: len(item[1]))
    if len(several) == 1:
        return NCCL
    if shares:
        return CPU if requested == "auto" else SHARED
    raise HpcMpError(f"ranks {', '.join(map(str, several))} on {seats[several[0]].node}", f"would share one GPU ({gpu})",
                     "give each rank a GPU of its own: lower job.ranks_per_node to the number of GPUs, or look at the options "
                     'that bind GPUs to tasks (--gpus-per-task, --gpu-bind). On CPUs: job.device = "cpu"')


def agree_on_devices(requested: str, who: RankEnv, keys: SignedKeys) -> tuple[torch.device, str]:
    """Return the device of this rank and the back end of all ranks' messages. All ranks that have met call this. Raises
    HpcMpError as ``device_choice``, on all ranks."""
    gpu = own_gpu(requested, who)
    keys.set(f"seat of rank {who.rank}", json.dumps(astuple(seat_of(who, gpu))))
    if who.rank == 0:
        seats = [Seat(*json.loads(keys.get(f"seat of rank {rank}"))) for rank in range(who.world)]
        try:
            keys.set("devices", json.dumps([device_choice(requested, seats, emulated())]))
        except HpcMpError as error:
            keys.set("devices", json.dumps([error.value, error.rule, error.remedy]))
            with suppress(dist.DistError):  # the store ends with this rank
                keys.wait([f"rank {rank} knows" for rank in range(1, who.world)], LATER)
            raise
    choice, *rest = json.loads(keys.get("devices"))
    if rest:
        keys.set(f"rank {who.rank} knows", "")
        raise HpcMpError(choice, *rest)
    return taken(gpu, choice)


def taken(gpu: torch.device | None, choice: str) -> tuple[torch.device, str]:
    """Make this rank's device, after ``device_choice``, the current one. Return it and the back end."""
    if gpu is None or choice == CPU:
        return torch.device("cpu"), "gloo"
    torch.cuda.set_device(gpu)
    return gpu, choice


def device_name(device: torch.device) -> str:
    """Return the GPU's model, or "cpu"."""
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"


def check_devices(devices: Sequence[tuple[str, str]]) -> None:
    """Check that all ranks compute on devices of the same model, and on whole devices. ``devices``: node and device name of every
    rank. Raises HpcMpError with the nodes of each model."""
    nodes: dict[str, dict[str, None]] = {}
    for node, name in devices:
        nodes.setdefault(name, {})[node] = None
    listed = "; ".join(f"{name} on {', '.join(hosts)}" for name, hosts in nodes.items())
    if any("MIG" in name.split() for name in nodes):
        raise HpcMpError(f"devices: {listed}", "a MIG slice cannot exchange data with another one",
                         "ask for whole GPUs: set slurm.gpu_type, or slurm.constraint to nodes without MIG")
    if len(nodes) > 1:
        raise HpcMpError(f"devices: {listed}", "are of different models: every step would wait for the slowest",
                         "ask for one model: set slurm.gpu_type, or slurm.constraint")


PROFILE = "env/profiles/engine-cuda.toml"
OLDER_NAMES = {"PYTORCH_ALLOC_CONF": "PYTORCH_CUDA_ALLOC_CONF"}  # under which torch reads them too


def prepare(environ: MutableMapping[str, str]) -> list[str]:
    """Set the variables that nobody has set, and return their names. CUDA and torch read them when a GPU is first used."""
    values = {row["name"]: row["value"] for row in asset_table(PROFILE)["variable"]}
    missing = {name: value for name, value in values.items() if environ.keys().isdisjoint((name, OLDER_NAMES.get(name, name)))}
    environ.update(missing)
    return list(missing)
