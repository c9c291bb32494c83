"""Rank and rendezvous of this process: found as by the ranks of a job, or received from the launcher."""

from __future__ import annotations

import json
import socket
from collections.abc import Mapping
from typing import TextIO

from hpc_mp.base.errors import HpcMpError
from hpc_mp.doctor.bench.events import THROUGH_LAUNCHER, Voice
from hpc_mp.doctor.bench.spec import BenchSpec
from hpc_mp.rundir.rank_env import RankEnv, identity
from hpc_mp.train.rank.rendezvous import Rendezvous, rendezvous


def meet(spec: BenchSpec, voice: Voice, environ: Mapping[str, str], answers: TextIO) -> tuple[RankEnv, Rendezvous]:
    """Return this rank and the rendezvous. Raises HpcMpError if the number of processes is not the number of ranks."""
    who = identity(environ)
    if who.world != spec.world:
        raise HpcMpError(f"{who.world} ranks ({who.source})", f"the measurement has {spec.world}", "start that many")
    return who, _through_launcher(who, voice, answers) if environ.get(THROUGH_LAUNCHER) == "1" else rendezvous(None, environ)


def _through_launcher(who: RankEnv, voice: Voice, answers: TextIO) -> Rendezvous:
    """Meet through the launcher: rank 0 listens on a free port and reports it, the launcher writes it to all ranks' stdin.

    No port is guessed, and no file on shared storage is needed.
    """
    listener = None
    if who.rank == 0 and who.world > 1:
        server = socket.create_server(("", 0), backlog=who.world)
        listener = server.fileno()
        voice.say("meet", node=who.node, port=server.getsockname()[1])
        server.detach()
    elif who.world == 1:
        return Rendezvous("", 0, "alone")
    where = json.loads(answers.readline())
    return Rendezvous(where["address"], where["port"], where["token"], listener)
