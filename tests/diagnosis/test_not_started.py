"""Tasks that were never started, for their container could not be made: slurmstepd's words, and the verdict."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest
from recorded_ends import tables

from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import TasksRefused, not_started
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory

PLACES = {place_.rank: place_ for place_ in place(Degrees(data=4), "DPT", 2).ranks}
JOB = Evidence(code=1, places=PLACES, hosts=("n1", "n2"), supervisor_host="n1", run=RunDirectory(Path("/run")))
RECORDED = tables("not_started.toml")
del RECORDED["parts"]
SEEN_BY_PYXIS, SEEN_BY_APPTAINER = (RECORDED[name]["refused"]["reason"] for name in ("no image", "no sif"))


def log(name: str, host: str) -> tuple[str, ...]:
    return tuple(line.replace("HOST", host) for line in RECORDED[name]["log"])


def ended(one: str, other: str, code: int) -> Evidence:
    said = (f"srun: error: n1: tasks 0-1: Exited with exit code {code}",
            "srun: launch/slurm: _step_signal: Terminating StepId=1.1",
            f"srun: error: n2: tasks 2-3: Exited with exit code {code}")
    return replace(JOB, srun=said, logs={"n1": log(one, "n1"), "n2": log(other, "n2")})


@pytest.mark.parametrize("name", RECORDED)
def test_what_slurmstepd_says(name: str) -> None:
    refused = RECORDED[name].get("refused")
    assert not_started(log(name, "n1")) == (TasksRefused(**refused) if refused else None)


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize(("one", "other", "code", "kind", "nodes", "words"), [
    ("no image", "no image", 1, "user", (), f"n1, like all nodes, could not start the ranks: {SEEN_BY_PYXIS}. Set slurm.con"),
    ("no image", "started", 1, "unfit", ("n1",), f"is unfit for this run: it could not start the ranks: {SEEN_BY_PYXIS}"),
    ("no registry", "no registry", 1, "user", (), "registry-1.docker.io"),
    ("no bash", "no bash", 2, "user", (), "execve(): bash: No such file or directory. Use an image that contains it"),
    ("interrupted", "interrupted", 1, "cancelled", (), "was ended by Slurm: SIGUSR2 arrived while the container was created"),
    ("no image", "asked to end", 1, "user", (), SEEN_BY_PYXIS),  # srun had the other ended
    ("no sif", "no sif", 255, "user", (), f"n1, like all nodes, could not start the ranks: {SEEN_BY_APPTAINER}. Set slurm.c"),
    ("no sif", "started", 255, "unfit", ("n1",), f"it could not start the ranks: {SEEN_BY_APPTAINER}"),
    ("no apptainer", "no apptainer", 2, "user", (), "execve(): apptainer: No such file or directory. Load the module"),
    ("started", "started", 1, "exit", (), "ended with exit code 1; its last words: step 1"),
])
def test_the_verdict(program: bool, one: str, other: str, code: int, kind: str, nodes: tuple[str, ...], words: str) -> None:
    found = classify(replace(ended(one, other, code), program=program))
    assert (found.kind, found.nodes) == (kind, nodes)
    assert words in found.message


@pytest.mark.parametrize("words", [
    "but OMPI was not built with SLURM's PMI support and therefore cannot",
    "[n1:00775] OPAL ERROR: Unreachable in file ext3x_client.c",
    "[unset]: launcher not compatible with PMI1 client",
    "check_MPIR_CVAR_PMI_VERSION(167):  Runtime environment uses unsupported PMI version PMIx. Aborting.",
    "MPIR_pmi_init(225)..............: PMI2_Init returned 14", "No PMIx server was reachable, but a PMI1/2 was detected."])
def test_an_mpi_that_does_not_know_its_launcher_names_the_key(words: str) -> None:
    """Open MPI 4.1.4 and 5.0.11 with pmi2, MPICH 5.0.2 with pmix, started by srun 22.05.8."""
    said = {"n1": (f"0: {words}", "0: *** An error occurred in MPI_Init"), "n2": ()}
    srun = ("srun: error: n1: tasks 0-1: Exited with exit code 1",)
    found = classify(replace(JOB, logs=said, srun=srun, program=True))
    assert 'slurm.mpi = "pmix" for Open MPI' in found.message and words in found.message and not found.retry
    other = classify(replace(JOB, logs={"n1": ("0: MPI_ABORT was invoked",), "n2": ()}, srun=srun, program=True))
    assert "slurm.mpi" not in other.message
