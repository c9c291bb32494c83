"""``hpc-mp adopt``: a program that works on a cluster which the script has started on the nodes of its job, as Ray's do."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_adopt_forms import checked

HEAD = "#!/bin/bash\n#SBATCH --nodes=3\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=2\n#SBATCH --time=5\n"
STEPS = [
    'srun -N1 -n1 -w "$H" ray start --head --block &\nfor i in 1 2; do srun -N1 -n1 -w "$i" ray start --block & done\n',
    'srun -N1 -n1 -w "$H" bash -c "ray start --head"\nsrun -N2 -n2 ray start --address $H\n',
    "for h in $(cat hosts); do ssh $h dask-worker & done\n", "srun -N1 -n1 dask-scheduler &\nsrun -N2 -n2 dask-worker &\n"]


@pytest.mark.parametrize("steps", STEPS)
@pytest.mark.parametrize("line", ["python drive.py a", 'srun --overlap -N1 -n1 -w "$H" python drive.py a',
                                  "ray job submit -- python drive.py a"])
def test_the_program_runs_on_the_first_node_and_the_job_keeps_all(line: str, steps: str, tmp_path: Path) -> None:
    job = checked(f"{HEAD}H=$(hostname)\n{steps}sleep 5\n{line}\nray job logs x\nray stop\n", tmp_path)
    program = job.spec.program
    assert (program.start, job.spec.job.nodes, job.spec.job.ranks_per_node, program.silent_limit) == ("node", 3, 2, 0)
    assert program.command[:4] == ("bash", "-c", '[ "$NODE_RANK" = 0 ] || exit 0; exec "$@"', "bash")
    assert program.command[4:] == tuple(line.rpartition('$H" ')[2].split())
    assert ("export SLURM_OVERLAP=1" in job.spec.slurm.setup) == ("srun" in steps)
    assert all("ray" in each.text for each in job.lost)


def test_without_such_steps_a_program_has_one_node(tmp_path: Path) -> None:
    job = checked(f"{HEAD}srun hostname &\npython drive.py\n", tmp_path)
    assert job.spec.job.nodes == 1 and "--nodes=3" in job.lost[0].why
    one = checked(f"{HEAD.replace('=3', '=1')}{STEPS[0]}python drive.py\n", tmp_path)
    assert one.spec.program.command == ("python", "drive.py") and one.spec.job.nodes == 1


@pytest.mark.parametrize("body", ["srun python train.py &\npython watch.py\nwait", "srun python train.py &\nwait"])
def test_a_program_in_the_background_for_which_the_script_waits_is_the_program(body: str, tmp_path: Path) -> None:
    assert checked(f"{HEAD}{body}\n", tmp_path).spec.program.command == ("python", "train.py")


def test_what_ends_with_the_program_is_named(tmp_path: Path) -> None:
    job = checked(f"{HEAD}srun -N1 -n1 ./solve a &\nsrun -N1 -n1 ./solve b &\nsrun -N1 -n1 ./solve c &\nwait\n", tmp_path)
    assert "what runs beside it (line 6, 7)" in job.lost[0].why and job.spec.job.nodes == 3


def test_a_script_that_starts_steps_by_other_means_keeps_all_nodes(tmp_path: Path) -> None:
    body = 'export RUN="srun --mpi=pmix -n 6"\nsource tests.sh\n'
    job = checked(f"{HEAD.replace('per-node=1', 'per-node=2')}{body}", tmp_path)
    assert job.spec.job.nodes == 3 and job.spec.program.command[3:] == ("bash", "/bin/bash", str(tmp_path / "script.sbatch"))
    assert job.lost == () and "on the first node; the job keeps all" in job.account[-1].why
    assert job.spec.program.environment == {"SLURM_NTASKS": "6", "SLURM_NPROCS": "6", "SLURM_NTASKS_PER_NODE": "2",
                                            "SLURM_TASKS_PER_NODE": "2(x3)"}
    assert "--nodes" not in str(job.spec.slurm.setup) and job.spec.slurm.setup[-1].endswith("SLURM_CPU_BIND=none")
