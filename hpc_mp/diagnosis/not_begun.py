"""Symptoms of tasks that never began: their node, container, Python, package or MPI was not there."""

import re
import signal
from collections.abc import Iterator

from hpc_mp.base.exit_codes import ending
from hpc_mp.diagnosis.ends import Symptom
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import CANNOT_START, NOT_INSTALLED, all_ends, not_started, unmet_mpi
from hpc_mp.rundir.attempt import last_words
from hpc_mp.rundir.failures import BY_SOMEBODY

REFUSED = re.compile(r"^(?:\d+: )?hpc-mp: (\S+): (?!warning: )(.+)$")  # of slurm/node-start.sh
REMEDY = "Set slurm.python, slurm.venv or slurm.conda to a Python with hpc-mp that all nodes see"
NO_CONTAINERS = re.compile(r"(apptainer|singularity): (command )?not found")
CONTAINERS_REMEDY = "Load the module that provides it (slurm.modules), or remove slurm.container"
IMAGE_REMEDY = ("Set slurm.container to an image that all nodes can read or fetch, and slurm.container_mounts to directories "
                "that exist on all nodes")
LACKING_REMEDY = "Use an image that contains it (slurm.container)"
REMEDIES = dict.fromkeys(("apptainer", "singularity"), CONTAINERS_REMEDY)  # by what a node lacks


def never_begun(evidence: Evidence) -> Iterator[Symptom]:
    """Yield symptoms of all kinds of tasks that never began."""
    for source in (_unfit, _not_started, _missing, _unmet):
        yield from source(evidence)


def _unfit(evidence: Evidence) -> Iterator[Symptom]:
    """Yield nodes that ``node-start.sh`` refused. If all were refused, the nodes are not to blame."""
    refusals = [(match[1], match[2]) for line in evidence.srun if (match := REFUSED.match(line)) and match[1] in evidence.hosts]
    everywhere = {host for host, _ in refusals} == set(evidence.hosts)
    for host, text in refusals:
        yield Symptom("user" if everywhere else "unfit", f"{host}: {text}" if everywhere else text, host)


def _not_started(evidence: Evidence) -> Iterator[Symptom]:
    """Yield nodes that could not start their tasks, or their container. If all failed, the nodes are not to blame."""
    reasons = {host: why for host in evidence.hosts if (why := not_started(evidence.logs.get(host, ()))) is not None}
    everywhere = len(reasons) == len(set(evidence.hosts))
    for host, why in reasons.items():
        if why.signal is not None and -why.signal in BY_SOMEBODY:
            name = signal.Signals(why.signal).name
            yield Symptom("cancelled", f"{name} arrived while the container was created: {why.reason}", host)
        elif everywhere:
            remedy = IMAGE_REMEDY if why.lacks is None else REMEDIES.get(why.lacks, LACKING_REMEDY)
            yield Symptom("user", f"{host}, like all nodes, could not start the ranks: {why.reason}. {remedy}", host)
        else:
            yield Symptom("unfit", f"it could not start the ranks: {why.reason}", host)


def _unmet(evidence: Evidence) -> Iterator[Symptom]:
    """Yield ranks of a program whose MPI does not know the launcher that started them."""
    reasons = (unmet_mpi(lines) for lines in evidence.logs.values() if evidence.program)
    yield from (Symptom("user", why) for why in list(filter(None, reasons))[:1])


def _missing(evidence: Evidence) -> Iterator[Symptom]:
    """Yield nodes without the ranks' Python, or without a package. If all nodes lack it, the nodes are not to blame. Ends that
    srun had requested count too: it stops at the first, but a rank without Python ends the same way. The user's program is
    excluded: it may lack a file on one rank only, and its own rank has reported if it could be started."""
    if evidence.program:
        return
    texts: dict[str, str] = {}
    for end in all_ends(evidence.srun):
        for task in end.tasks:
            rank = evidence.rank_of(end.host, task)
            output = last_words(evidence.lines_of_task(end.host, task))
            lacks = end.code in CANNOT_START or NOT_INSTALLED.match(output)
            if end.code is not None and lacks and evidence.is_silent(end, rank):
                text = ending(end.code) + (f"; its last words: {output}" if output else "")
                texts.setdefault(end.host, f"{f'task {task}' if rank is None else f'rank {rank}'} {text}")
    everywhere = set(texts) == set(evidence.hosts)
    for host, text in texts.items():
        remedy = CONTAINERS_REMEDY if NO_CONTAINERS.search(text) else REMEDY
        lacking = f"{host}, like all nodes, lacks what ranks need: {text}. {remedy}"
        yield Symptom("user", lacking, host) if everywhere else Symptom("unfit", text, host)
