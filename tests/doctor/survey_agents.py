"""Agents as processes of this machine, over the loopback."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

from hpc_mp.doctor.survey.agents import AgentPool
from hpc_mp.doctor.survey.evidence import SurveyEvidence
from hpc_mp.doctor.survey.facts import NodeFacts
from hpc_mp.doctor.survey.measurements import Measurements
from hpc_mp.doctor.survey.start import AGENT


@dataclass(frozen=True)
class Local:
    """``processes``: one per agent, n0 …"""

    crew: AgentPool
    tools: Measurements
    processes: list[subprocess.Popen[str]]

    @property
    def evidence(self) -> SurveyEvidence:
        return self.tools.evidence


@contextmanager
def agents(count: int, *interfaces: str) -> Iterator[Local]:
    pipe = subprocess.PIPE
    names = ",".join(f"n{rank}" for rank in range(count))
    command = [sys.executable, "-m", AGENT, *(interfaces or ("lo",))]
    slurm = [{"SLURM_PROCID": str(rank), "SLURMD_NODENAME": f"n{rank}", "SLURM_STEP_NODELIST": names} for rank in range(count)]
    processes = [subprocess.Popen(command, text=True, stdin=pipe, stdout=pipe, stderr=pipe, env=os.environ | one)
                 for one in slurm]
    try:
        with AgentPool(processes) as crew:
            hellos = crew.assemble(lambda _: count, 60.0, lambda _: None)
            facts = {rank: NodeFacts.read(hello["facts"]) for rank, hello in sorted(hellos.items())}
            evidence = SurveyEvidence(tuple(one.node for one in facts.values()), tuple(facts.values()))
            yield Local(crew, Measurements(crew, list(facts), evidence), processes)
    finally:
        for process in processes:
            if process.poll() is None:
                process.send_signal(signal.SIGCONT)
                process.kill()
                process.wait()
