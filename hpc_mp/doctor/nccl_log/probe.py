"""Probe of NCCL: one rank on one GPU starts NCCL as a training does, so that NCCL chooses its network and logs the choice.

``python -P -m hpc_mp.doctor.nccl_log.probe``: the log is on standard output. Without torch, a GPU or NCCL it prints nothing and
exits with 0. NCCL's variables are inherited; only the place and amount of logging are set here.
"""

import os
import sys

# An empty file name counts as unset, and overrides one in /etc/nccl.conf.
LOGGED = {"NCCL_DEBUG": "INFO", "NCCL_DEBUG_SUBSYS": "INIT,NET,ENV", "NCCL_DEBUG_FILE": ""}


def main() -> int:
    os.environ.update(LOGGED)  # before NCCL is loaded
    try:
        import torch
        import torch.distributed as dist
    except ImportError:
        return 0
    if not (torch.cuda.is_available() and dist.is_available() and dist.is_nccl_available()):
        return 0
    torch.cuda.set_device(0)
    dist.init_process_group("nccl", store=dist.HashStore(), rank=0, world_size=1)
    dist.all_reduce(torch.zeros(1, device="cuda"))
    torch.cuda.synchronize()
    dist.destroy_process_group()
    return 0


if __name__ == "__main__":
    sys.exit(main())
