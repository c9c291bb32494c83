"""The worker of a submitted callable: the code of every task, both on Slurm and on emulated nodes."""

import os
import socket
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from hpc_mp.rundir import read_json, write_json

MEET_S = 300.0  # until task 0 must have published its address: a shared file system may show it late


@dataclass(frozen=True)
class SubmittedCall:
    """A call to make once per task. submitit pickles it; its result or failure is returned through files."""

    function: Callable[..., Any]
    arguments: tuple[Any, ...]
    keywords: Mapping[str, Any]

    def __call__(self) -> Any:
        folder, rank = Path(os.environ["SUBMITIT_FOLDER"]), int(os.environ["SLURM_PROCID"])
        try:
            os.environ.update(torch_names(folder, rank))
            return self.function(*self.arguments, **self.keywords)
        except BaseException as error:
            write_json(failure_file(folder, rank), {
                "rank": rank, "node": os.environ["SLURMD_NODENAME"], "host": socket.gethostname(), "time": time.time(),
                "kind": "error", "message": f"{type(error).__name__}: {error}", "traceback": traceback.format_exc()})
            raise


def failure_file(folder: Path, rank: int) -> Path:
    return folder / f"failure-{rank}.json"


def torch_names(folder: Path, rank: int) -> dict[str, str]:
    """Return the variables that ``torch.distributed`` and similar libraries read. Task 0 publishes its address: its host may be
    anywhere in Slurm's list. Raises TimeoutError if task 0 has published nothing."""
    meeting = folder / f"meeting-{os.environ['SLURM_JOB_ID']}.{os.environ.get('SLURM_RESTART_COUNT', '0')}.json"
    if rank == 0:
        emulated = os.environ.get("HPC_MP_EMULATED") == "1"
        write_json(meeting, {"address": "127.0.0.1" if emulated else os.environ["SLURMD_NODENAME"], "port": _free_port()})
    deadline = time.monotonic() + MEET_S
    while not meeting.exists():
        if time.monotonic() > deadline:
            raise TimeoutError(f"task 0 has not written {meeting} in {MEET_S:g} s")
        time.sleep(0.1)
    endpoint = read_json(meeting)
    return {"RANK": str(rank), "WORLD_SIZE": os.environ["SLURM_NTASKS"], "LOCAL_RANK": os.environ["SLURM_LOCALID"],
            "MASTER_ADDR": endpoint["address"], "MASTER_PORT": str(endpoint["port"])}


def emulated(folder: Path) -> int:
    """Run an emulated task, as its entry (see ``hpc_mp.launch.emulator.zygote``)."""
    from submitit.core.submission import process_job

    if "HPC_MP_LISTEN_FD" in os.environ:
        os.close(int(os.environ.pop("HPC_MP_LISTEN_FD")))
    process_job(folder)
    return 0


def _free_port() -> int:
    with socket.create_server(("", 0)) as server:
        port: int = server.getsockname()[1]
        return port
