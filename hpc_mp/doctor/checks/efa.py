"""Amazon's adapter: the software beside its driver."""

from __future__ import annotations

from collections.abc import Iterator

from hpc_mp.base.findings import Finding
from hpc_mp.cluster.node.rdma import Efa, read_efa
from hpc_mp.doctor.checks.check import Check


def software(efa: Efa) -> Iterator[Finding]:
    if not any(adapter.efa for adapter in efa.fabric.adapters):
        return
    if efa.library is None:
        yield Finding("efa-software", "error", "libfabric", "is not in any of its places: NCCL would fall back to sockets")
    if efa.plugin is None:
        yield Finding("efa-software", "warning", "aws-ofi-nccl", "is not in any of its places; a container may bring its own",
                      "install it (the EFA installer does, since 1.29), or see that the container has it")
    if efa.library and efa.plugin:
        yield Finding("efa-software", "ok", "", f"driver {efa.driver or 'of unknown version'}, {efa.library}, {efa.plugin}")


CHECKS: tuple[Check[Efa], ...] = (
    Check("efa-software", read_efa, software,
          "`/opt/amazon/efa`, `/opt/amazon/ofi-nccl`, `/sys/module/efa/version`",
          "error: EFA without libfabric; warning: without the plug-in aws-ofi-nccl",
          "install Amazon's EFA software (efa_installer.sh)"),
)
