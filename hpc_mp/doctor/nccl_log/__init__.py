"""NCCL's actual behaviour, from its own log and from the counters of the network's ports."""

from hpc_mp.doctor.nccl_log.judge import (
           PROGRAMS,
           Machine,
           judge,
           judge_ports,
           logged,
           machine_of,
           read_port_bytes,
           refused,
           taken,
)
from hpc_mp.doctor.nccl_log.parse import parse
from hpc_mp.doctor.nccl_log.truth import NcclChannel, NcclTruth, Trouble

__all__ = ["PROGRAMS", "Machine", "NcclChannel", "NcclTruth", "Trouble", "judge", "judge_ports", "logged",
           "machine_of", "parse", "read_port_bytes", "refused", "taken"]
