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


NODES = "nodes=($(scontrol show hostnames $SLURM_JOB_NODELIST))\nH=${nodes[0]}\n"
ON_FOUR = "#!/bin/bash\n#SBATCH --nodes=4\n#SBATCH --ntasks-per-node=1\n#SBATCH --gpus-per-node=8\n#SBATCH --time=5\n"
STEP = "srun -N1 -n1 -w ${nodes[$i]}"
TORCH = "torchrun --nnodes=$SLURM_NNODES --nproc_per_node=8 --node_rank=%s --master_addr=$H --master_port=29500 train.py --lr 1"
EVERY_NODE = {  # the forms of public scripts
    "c": f"for ((i=0; i<SLURM_NNODES; i++)); do\n  {STEP} {TORCH % '$i'} &\ndone",
    "seq": f"for i in $(seq 0 $((SLURM_NNODES-1))); do\n  echo $i\n  {STEP} {TORCH % '${i}'} &\n  sleep 1\ndone",
    "braces": f"for i in {{0..3}}; do {STEP} {TORCH % '$i'} > log_$i 2>&1 & done",
    "hosts": f"R=0\nfor n in ${{nodes[@]}}; do\n  srun --nodes=1 --ntasks=1 --nodelist=$n {TORCH % '$R'} &\n  R=$((R+1))\ndone",
    "while": f"i=0\nwhile [ $i -lt $SLURM_NNODES ]; do\n  srun -N 1 -n 1 --relative=$i {TORCH % '$i'} &\n  ((i++))\ndone",
    "head": f"srun -N1 -n1 -w $H {TORCH % 0} &\nfor ((i=1; i<=W; i++)); do\n  {STEP} {TORCH % '$i'} &\ndone",
    "each": "".join(f"srun -N1 -n1 -w ${{nodes[{number}]}} {TORCH % number} &\n" for number in range(4))}


@pytest.mark.parametrize("form", EVERY_NODE)
def test_steps_of_one_node_each_are_a_program_on_all_nodes(form: str, tmp_path: Path) -> None:
    job = checked(f"{ON_FOUR}{NODES}{EVERY_NODE[form]}\nwait\n", tmp_path)
    assert (job.spec.job.nodes, job.spec.job.ranks_per_node, job.lost) == (4, 8, ())
    assert job.spec.program.command == ("python", "-u", "train.py", "--lr", "1") and job.spec.slurm.setup == ()


@pytest.mark.parametrize(("loop", "command"), [
    (f"for i in {{0..3}}; do {STEP} python t.py --rank ${{i}} & done", "exec python t.py --rank $NODE_RANK"),
    (f"srun -N1 -n1 -w $H python t.py 0 &\nfor i in {{1..3}}; do {STEP} python t.py $i & done", "exec python t.py $NODE_RANK"),
    (f"for i in {{0..3}}; do {STEP} bash -c \"torchrun --node_rank=$i --nnodes 4 t.py\" & done",
     "torchrun --node_rank=$NODE_RANK --nnodes 4 t.py")])
def test_what_counts_nodes_in_a_loop_is_the_number_of_a_node(loop: str, command: str, tmp_path: Path) -> None:
    job = checked(f"{ON_FOUR}{NODES}{loop}\nwait\n", tmp_path)
    assert (job.lost, job.spec.program.command) == ((), ("bash", "-c", command))
    assert (job.spec.job.nodes, job.spec.program.start) == (4, "node")


@pytest.mark.parametrize("loop", [
    "for n in ${nodes[@]}; do srun -N1 -n1 -w $n python t.py --host $n & done",
    f"for i in {{0..3}}; do {STEP} python t.py --at $H:$i & done"])
def test_other_words_that_differ_from_node_to_node_are_named(loop: str, tmp_path: Path) -> None:
    job = checked(f"{ON_FOUR}{NODES}{loop}\nwait\n", tmp_path)
    assert job.spec.job.nodes == 4 and "differs from node to node" in job.lost[0].why


@pytest.mark.parametrize("loop", [
    f"for i in {{0..3}}; do {STEP} python t.py $i; done", f"for i in {{0..1}}; do {STEP} python t.py $i & done",
    "for i in {0..3}; do srun -N1 -n1 python t.py $i & done", f"for i in {{0..7}}; do {STEP} python t.py $i & done",
    "for i in {0..7}; do srun -N1 -n1 -w ${nodes[$((i % 4))]} python t.py $i & done",
    f"for i in {{0..3}}; do {STEP} python t.py $i & wait; make $i; done"])
def test_other_loops_are_no_program_on_all_nodes(loop: str, tmp_path: Path) -> None:
    job = checked(f"{ON_FOUR}{NODES}{loop}\nwait\n", tmp_path)
    assert "only the first round" in job.lost[0].why


@pytest.mark.parametrize(("directives", "line", "size"), [
    ("-N 1|-n 1|--ntasks-per-node=4", "srun ./solve", (1, 1)), ("-n 8|--ntasks-per-node=4", "srun ./solve", (2, 4)),
    ("-N 2|-n 6|--ntasks-per-node=8", "srun ./solve", (2, 3)), ("-N 4|-n 2", "srun ./solve", (2, 1)),
    ("-N 2|-n 2|--ntasks-per-node=4", "srun --ntasks-per-node=4 ./solve", (2, 1)),
    ("-N 2|--ntasks-per-node=4", "srun -n 2 --ntasks-per-node=4 ./solve", (2, 1)),
    ("-N 1|-n 1|--ntasks-per-node=4|--gpus-per-node=4", "srun python t.py", (1, 4)),
    ("-N 2|-n 2|--ntasks-per-node=4", "mpirun ./solve", (2, 1))])
def test_tasks_in_all_count_before_those_of_a_node(directives: str, line: str, size: tuple[int, int], tmp_path: Path) -> None:
    head = "".join(f"#SBATCH {each}\n" for each in directives.split("|"))
    job = checked(f"#!/bin/bash\n{head}#SBATCH --time=5\n{line}\n", tmp_path)
    assert (job.spec.job.nodes, job.spec.job.ranks_per_node) == size
    assert job.spec.program.start == ("node" if "gpus" in directives else "mpi" if "mpirun" in line else "rank")
