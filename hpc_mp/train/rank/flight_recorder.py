"""torch's flight recorder: the last messages of this process, of which a device may not have finished some.

With NCCL a message is over for the host when its kernel has been launched. If another rank does not come, the host stands
somewhere else, for example in its wait for the numbers of a step. The recorder knows the messages that are under way.
"""

import json
import re
from collections.abc import Mapping
from typing import Any

import torch

from hpc_mp.rundir.standings import Wait

RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # names of torch 2.13, and of earlier releases
DIRECTED = re.compile(r"(?P<operation>send|recv) \d+(?:->|<-)(?P<peer>\d+)")

Members = Mapping[str, tuple[int, ...]]  # name of a process group -> its ranks in the world


def recorded() -> dict[str, Any]:
    """Return the record of this process; empty if torch keeps none."""
    for name in RECORDERS:
        if (dump := getattr(torch._C._distributed_c10d, name, None)) is not None:
            record: dict[str, Any] = json.loads(dump())
            return record
    return {}


def under_way(record: Mapping[str, Any], members: Members, rank: int) -> Wait | None:
    """Return the oldest message that is not complete; None if all are. ``record``: the result of ``recorded``. ``members``:
    groups whose messages count. ``rank``: this rank's number in the world."""
    for entry in sorted(record.get("entries", ()), key=lambda entry: entry["record_id"]):
        group = entry["process_group"][0]
        if entry["retired"] or entry["state"] == "completed" or group not in members:
            continue
        ranks, channel, what = members[group], f"group {group}", entry["profiling_name"].partition(":")[2]
        if not entry["is_p2p"]:
            others = tuple(other for other in ranks if other != rank)
            return Wait(what.removeprefix("_").removesuffix("_base"), others, channel, entry["collective_seq_id"])
        if directed := DIRECTED.fullmatch(what):
            peer, sends = ranks[int(directed["peer"])], directed["operation"] == "send"
            sender, receiver, part = (rank, peer, "received") if sends else (peer, rank, "sent")
            return Wait(directed["operation"], (peer,), f"{channel}, rank {sender} to {receiver}, {part}", entry["p2p_seq_id"])
    return None
