"""Disks of the node's own: NVMe controllers and software RAID."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass

from hpc_mp.catalogue import MachineType
from hpc_mp.cluster.node.machines import read_machine_type
from hpc_mp.cluster.node.parse import maybe
from hpc_mp.cluster.node.source import NodeSource

_ARRAY = re.compile(r"^(md\S*) : .*\n.*?\[(\d+)/(\d+)\]", re.MULTILINE)


@dataclass(frozen=True)
class Disks:
    """Attributes:
        controllers: NVMe controllers to their state: ``live``, ``resetting``, ``dead`` …
        models: likewise, to their model.
        arrays: RAID arrays to (disks that it should have, disks that it has).
    """

    controllers: Mapping[str, str]
    models: Mapping[str, str]
    arrays: Mapping[str, tuple[int, int]]
    kind: MachineType | None


def read_disks(source: NodeSource) -> Disks:
    """Never raises."""
    paths = source.names("/sys/class/nvme/nvme[0-9]*")
    return Disks(
        controllers={path.rpartition("/")[2]: maybe(source.text, f"{path}/state") or "unknown" for path in paths},
        models={path.rpartition("/")[2]: maybe(source.text, f"{path}/model") or "" for path in paths},
        arrays={name: (int(wanted), int(there))
                for name, wanted, there in _ARRAY.findall(maybe(source.text, "/proc/mdstat") or "")},
        kind=read_machine_type(source),
    )
