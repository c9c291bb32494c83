"""Ranks that come up through MPI: a real mpiexec where there is one, and refusals."""

import os
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import pytest
from layouts import job, run_whole, start, write_text
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.job import JobSpec, dump_job
from hpc_mp.layout.placement import Degrees, place, to_dict
from hpc_mp.rundir import AttemptRecord, RunDirectory, read_lines, write_attempt, write_json
from hpc_mp.train.rank.mpi import check_size, world

MPIEXEC = shutil.which("mpiexec", path=os.pathsep.join((os.path.dirname(sys.executable), os.environ["PATH"])))
LAYOUT = ["job.nodes=2", "job.ranks_per_node=2", "parallel.tensor=2", "parallel.pipeline=2", "parallel.microbatches=2"]
needs_mpi = pytest.mark.skipif(MPIEXEC is None, reason="no mpiexec (pip install mpich)")


@pytest.mark.parametrize(("size", "expected", "environ", "words"), table(__file__, "mpi.toml", "refused"))
def test_another_number_of_processes_is_refused(size: int, expected: int, environ: dict[str, str], words: list[str]) -> None:
    with pytest.raises(HpcMpError) as caught:
        check_size(size, expected, environ)
    assert all(word in str(caught.value) for word in words)
    check_size(expected, expected, environ)


def test_a_missing_mpi4py_is_named_with_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "mpi4py", None)
    with pytest.raises(HpcMpError, match=r"pip install .hpc-mp\[mpi\]"), world():
        pass


def mpiexec(processes: int, job_file: Path, **environ: str) -> subprocess.CompletedProcess[str]:
    assert MPIEXEC is not None
    argv: Sequence[str] = [MPIEXEC, "-n", str(processes), sys.executable, "-m", "hpc_mp", "train", str(job_file)]
    clean = {name: value for name, value in os.environ.items() if not name.startswith("SLURM_")}
    return subprocess.run(argv, capture_output=True, text=True, timeout=200, env={
        **clean, "PYTHONPATH": os.pathsep.join(sys.path), "HPC_MP_MPI": "1", "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo", "OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
        "OMPI_MCA_rmaps_base_oversubscribe": "1", "PRTE_MCA_rmaps_default_mapping_policy": ":oversubscribe", **environ})


def forked(directory: Path, overrides: list[str]) -> tuple[JobSpec, tuple[float, ...]]:
    write_text(directory)
    ranks = job(directory, "gpt2", overrides).ranks
    one_node = ["job.nodes=1", f"job.ranks_per_node={ranks}", *overrides[2:]]
    return job(directory, "gpt2", overrides), run_whole(job(directory, "gpt2", one_node)).losses


@pytest.mark.prove  # in make test mpirun starts ranks in tests/launch/test_mpi_program.py
@needs_mpi
def test_ranks_started_by_mpiexec_train_as_forked_ones(tmp_path: Path) -> None:
    spec, losses = forked(tmp_path, ["job.nodes=2", "job.ranks_per_node=1", "parallel.pipeline=2", "parallel.microbatches=2"])
    path = tmp_path / "job.toml"
    path.write_text(dump_job(spec))
    done = mpiexec(2, path)
    assert done.returncode == 0, done.stderr
    assert tuple(line["loss"] for line in read_lines(RunDirectory(tmp_path / "runs" / "exact" / "0002").metrics)) == losses
    assert mpiexec(1, path).returncode == 2, "and another number of processes is refused"


@pytest.mark.prove
@needs_mpi
def test_rank_0_need_not_be_the_first_process(tmp_path: Path) -> None:
    spec, losses = forked(tmp_path, LAYOUT)
    run = start(spec)
    write_json(run.placement, to_dict(place(Degrees(2, 2, 1), "DPT", 2, (1, 0, 1, 0))))
    write_attempt(run.attempt_record, AttemptRecord("7.0.1", 1, ("here", "here"), "127.0.0.1", 1, "s"))
    done = mpiexec(4, run.job, HPC_MP_TOKEN="7.0.1", SLURMD_NODENAME="here")
    assert done.returncode == 0, done.stderr
    assert tuple(line["loss"] for line in read_lines(run.metrics)) == losses
    run.stop.touch()
    assert mpiexec(4, run.job, HPC_MP_TOKEN="7.0.1", SLURMD_NODENAME="here").returncode == 75, "codes come through"
    assert mpiexec(4, run.job, HPC_MP_TOKEN="6.0.1", SLURMD_NODENAME="here").returncode == 1
