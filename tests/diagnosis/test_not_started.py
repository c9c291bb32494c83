"""Tasks that were never started, for their container could not be made: slurmstepd's words with pyxis 0.24.0, enroot 4.1.2 and
Slurm 22.05, and those of apptainer 1.4.5, as recorded on two hosts with two tasks each."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

from hpc_mp.diagnosis.classify import classify
from hpc_mp.diagnosis.evidence import Evidence
from hpc_mp.diagnosis.lines import TasksRefused, not_started
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory

PLACES = {place_.rank: place_ for place_ in place(Degrees(data=4), "DPT", 2).ranks}
JOB = Evidence(code=1, places=PLACES, hosts=("n1", "n2"), supervisor_host="n1", run=RunDirectory(Path("/run")))

GONE = """
0: slurmstepd-{0}: error: spank: required plugin spank_pyxis.so: task_init() failed with rc=-1
0: slurmstepd-{0}: error: Failed to invoke spank plugin stack
"""
OTHER_TASK = "1: slurmstepd-{0}: error: pyxis: container was not started successfully by another task" + GONE.replace("0:", "1:")
NO_IMAGE = """
0: slurmstepd-{0}: error: pyxis: child 1670 failed with error code: 1
0: slurmstepd-{0}: error: pyxis: failed to create container filesystem for image: /images/none.sqsh
0: slurmstepd-{0}: error: pyxis: printing enroot log file:
0: slurmstepd-{0}: error: pyxis:     [ERROR] No such file or directory: /images/none.sqsh
""" + OTHER_TASK + GONE + "0: slurmstepd-{0}: error: pyxis: child 1687 failed with error code: 1"
NO_REGISTRY = """
0: slurmstepd-{0}: error: pyxis: child 3078 failed with error code: 6
0: slurmstepd-{0}: error: pyxis: failed to import docker image: ubuntu:24.04
0: slurmstepd-{0}: error: pyxis: printing enroot log file:
0: slurmstepd-{0}: error: pyxis:     [INFO] Querying registry for permission grant
0: slurmstepd-{0}: error: pyxis:     curl: (6) Could not resolve host: registry-1.docker.io
""" + GONE + OTHER_TASK
NO_MOUNT = OTHER_TASK + """
0: slurmstepd-{0}: error: pyxis: --container-mounts: source path does not exist: /no/such
0: slurmstepd-{0}: error: pyxis: couldn't create enroot start configuration script
0: slurmstepd-{0}: error: pyxis: printing enroot log file:
0: slurmstepd-{0}: error: pyxis:     [INFO] Extracting squashfs filesystem...
0: slurmstepd-{0}: error: pyxis:     Parallel unsquashfs: Using 2 processors
0: slurmstepd-{0}: error: pyxis:     4326 inodes (4171 blocks) to write
0: slurmstepd-{0}: error: pyxis:
0: slurmstepd-{0}: error: pyxis:     created 3813 files
0: slurmstepd-{0}: error: pyxis: container was not started successfully by another task
""" + GONE
NO_HOOK = """
0: slurmstepd-{0}: error: pyxis: container start failed with error code: 1
0: slurmstepd-{0}: error: pyxis: printing enroot log file:
0: slurmstepd-{0}: error: pyxis:     enroot-mount: failed to create directory: /tmp/sys/fs/cgroup: No such file or directory
""" + OTHER_TASK + GONE
NO_BASH = """
0: slurmstepd-{0}: error: execve(): bash: No such file or directory
1: slurmstepd-{0}: error: execve(): bash: No such file or directory
0: slurmstepd-{0}: error: *** STEP 22.1 ON {0} CANCELLED AT 2026-11-25T14:48:53 ***
"""
INTERRUPTED = """
0: slurmstepd-{0}: error: pyxis: child 2938 terminated with signal 12
0: slurmstepd-{0}: error: pyxis: failed to create container filesystem for image: /images/debian.sqsh
0: slurmstepd-{0}: error: pyxis: printing enroot log file:
""" + OTHER_TASK + GONE
NO_SIF = """
0: FATAL:   While checking container encryption: could not open image /images/none.sif: failed to retrieve path for it
1: INFO:    Converting SIF file to temporary sandbox...
1: FATAL:   While checking container encryption: could not open image /images/none.sif: failed to retrieve path for it
0: slurmstepd-{0}: error: *** STEP 14.1 ON {0} CANCELLED AT 2026-11-25T14:46:25 ***
"""
NO_APPTAINER = "0: slurmstepd-{0}: error: execve(): apptainer: No such file or directory"
ONE_BEGAN = """
0: FATAL:   container creation failed: no room
1: step 1
"""
SEEN_BY_APPTAINER = "While checking container encryption: could not open image /images/none.sif: failed to retrieve path for it"
STARTED = """
0: slurmstepd-{0}: error: Unable to create TMPDIR [/imagetmp]: Read-only file system
0: slurmstepd-{0}: error: Setting TMPDIR to /tmp
0: step 1
0: slurmstepd-{0}: error: *** STEP 14.1 ON {0} CANCELLED AT 2026-11-25T14:46:25 ***
"""
SEEN_BY_PYXIS = "failed to create container filesystem for image: /images/none.sqsh: No such file or directory: /images/none.sqsh"


def log(text: str, host: str) -> tuple[str, ...]:
    return tuple(line for line in text.format(host).splitlines() if line)


def ended(one: str, other: str, code: int) -> Evidence:
    said = (f"srun: error: n1: tasks 0-1: Exited with exit code {code}",
            "srun: launch/slurm: _step_signal: Terminating StepId=1.1",
            f"srun: error: n2: tasks 2-3: Exited with exit code {code}")
    return replace(JOB, srun=said, logs={"n1": log(one, "n1"), "n2": log(other, "n2")})


@pytest.mark.parametrize(("text", "expected"), [
    (NO_IMAGE, TasksRefused(SEEN_BY_PYXIS)),
    (NO_REGISTRY, TasksRefused("failed to import docker image: ubuntu:24.04: curl: (6) Could not resolve host: "
                             "registry-1.docker.io")),
    (NO_MOUNT, TasksRefused("--container-mounts: source path does not exist: /no/such")),
    (NO_HOOK, TasksRefused("enroot-mount: failed to create directory: /tmp/sys/fs/cgroup: No such file or directory")),
    (NO_BASH, TasksRefused("execve(): bash: No such file or directory", lacks="bash")),
    (INTERRUPTED, TasksRefused("failed to create container filesystem for image: /images/debian.sqsh", signal=12)),
    (GONE, TasksRefused("Failed to invoke spank plugin stack")),
    (NO_SIF, TasksRefused(SEEN_BY_APPTAINER)),
    (NO_APPTAINER, TasksRefused("execve(): apptainer: No such file or directory", lacks="apptainer")),
    (ONE_BEGAN, None),
    ("", None),
    (STARTED, None),
    (STARTED + "0: Failed to invoke spank plugin stack", None),  # a program says what it likes
])
def test_what_slurmstepd_says(text: str, expected: TasksRefused | None) -> None:
    assert not_started(log(text, "n1")) == expected


@pytest.mark.parametrize("program", [False, True])
@pytest.mark.parametrize(("one", "other", "code", "kind", "nodes", "words"), [
    (NO_IMAGE, NO_IMAGE, 1, "user", (), f"n1, like all nodes, could not start the ranks: {SEEN_BY_PYXIS}. Set slurm.container"),
    (NO_IMAGE, STARTED, 1, "unfit", ("n1",), f"is unfit for this run: it could not start the ranks: {SEEN_BY_PYXIS}"),
    (NO_REGISTRY, NO_REGISTRY, 1, "user", (), "registry-1.docker.io"),
    (NO_BASH, NO_BASH, 2, "user", (), "execve(): bash: No such file or directory. Use an image that contains it"),
    (INTERRUPTED, INTERRUPTED, 1, "cancelled", (), "was ended by Slurm: SIGUSR2 arrived while the container was created"),
    (NO_IMAGE, INTERRUPTED.replace("signal 12", "signal 15"), 1, "user", (), SEEN_BY_PYXIS),  # srun had the other ended
    (NO_SIF, NO_SIF, 255, "user", (), f"n1, like all nodes, could not start the ranks: {SEEN_BY_APPTAINER}. Set slurm.container"),
    (NO_SIF, STARTED, 255, "unfit", ("n1",), f"it could not start the ranks: {SEEN_BY_APPTAINER}"),
    (NO_APPTAINER, NO_APPTAINER, 2, "user", (), "execve(): apptainer: No such file or directory. Load the module"),
    (STARTED, STARTED, 1, "exit", (), "ended with exit code 1; its last words: step 1"),
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
