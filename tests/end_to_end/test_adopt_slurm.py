"""A script and the job that was made of it, both on a real Slurm: the same world, arguments and variables on each rank."""

from __future__ import annotations

import json
import os
import shutil
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from slurm_lab.lab import Lab

SEEN = """import json, os, sys
names = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "LOCAL_WORLD_SIZE", "SLURM_NTASKS", "OMP_NUM_THREADS", "COLOUR", "LIST", "SUB")
rank = os.environ.get("RANK", os.environ.get("SLURM_PROCID"))
if os.environ.get("SEEN_RANK") == "task":
    names = names[4:]
else:  # of torchrun there is a task per node, and of its ranks a task each
    names = tuple(name for name in names if name != "SLURM_NTASKS")
with open(f"{os.environ['OUT']}/{rank}.json", "w") as file:
    json.dump([sys.argv[1:], os.getcwd(), {name: os.environ.get(name) for name in names}], file)
"""
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=5\n#SBATCH --output=/dev/null\n"
SCRIPTS = {
    "srun": """#SBATCH --ntasks-per-node=2
export COLOUR=red OMP_NUM_THREADS=2 SEEN_RANK=task
LR=3e-4
export MASTER_ADDR=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
srun PYTHON seen.py --lr $LR "a b" '$HOME' é --tasks $SLURM_NTASKS --job-nodes "$SLURM_NNODES"
echo done
""",
    "torchrun": """#SBATCH --ntasks-per-node=1
#SBATCH --cpus-per-task=2
set -e
head=$(scontrol show hostnames "$SLURM_JOB_NODELIST" | head -n 1)
export COLOUR="light blue"
ARGS=(--name "x y" --empty "")
srun PYTHON -m torch.distributed.run --nnodes $SLURM_NNODES --nproc_per_node 2 \\
    --rdzv_backend c10d --rdzv_id 1 --rdzv_endpoint $head:29517 seen.py "${ARGS[@]}" --stamp "$(echo a  b)" *.py
""",
    "branch": """#SBATCH --ntasks=4
mkdir -p sub
export LIST="1  2" SEEN_RANK=task OMP_NUM_THREADS=1
cd sub
if [ -d ../sub ]; then
    export SUB=$(basename "$PWD")
    srun PYTHON ../seen.py --branch yes $LIST
    echo never
else
    srun PYTHON ../seen.py --branch no
fi
""",
    "shell": """#SBATCH --ntasks-per-node=2
export OMP_NUM_THREADS=1 SEEN_RANK=task
CMD="PYTHON seen.py --rank-of \\$SLURM_PROCID --words 1 2"
srun bash -c "$CMD"
""",
    "loose": """#SBATCH --ntasks-per-node=2
export OMP_NUM_THREADS=1 SEEN_RANK=task
run_it() {
    local what=$1; shift
    srun --label PYTHON seen.py --what "$what" "$@"
}
run_it first 'q"q' ~/x {1..3} || exit 1
"""}


@pytest.fixture
def here(lab: Lab) -> Iterator[Path]:
    directory = lab.share / f"a script {os.urandom(2).hex()}"
    for path in (directory, directory / "state"):
        path.mkdir()
        path.chmod(0o777)
    yield directory
    shutil.rmtree(directory, ignore_errors=True)


def seen(directory: Path) -> dict[str, object]:
    return {path.name: json.loads(path.read_text()) for path in sorted(directory.glob("*.json"))}


@pytest.mark.prove
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", SCRIPTS)
def test_an_adopted_job_sees_what_the_script_saw(lab: Lab, here: Path, name: str) -> None:
    body = SCRIPTS[name].replace("PYTHON", sys.executable)
    (here / "seen.py").write_text(SEEN)
    (here / "job.sbatch").write_text(HEAD + body)
    out = {which: here / which for which in ("theirs", "ours")}
    for path in out.values():
        path.mkdir()
    environ = {"XDG_STATE_HOME": str(here / "state")}
    first = lab.run(["sbatch", "--wait", "job.sbatch"], timeout=120, cwd=here, environ=environ | {"OUT": str(out["theirs"])})
    assert first.returncode == 0, first.stdout + first.stderr
    hpc_mp = [sys.executable, "-m", "hpc_mp"]
    made = lab.run([*hpc_mp, "adopt", "job.sbatch"], timeout=60, cwd=here, environ=environ)
    assert made.returncode == 0, made.stdout + made.stderr
    ran = lab.run([*hpc_mp, "launch", "job.toml", "--on", "slurm", "--wait", "--set", "environment.health=false"], timeout=240,
                  cwd=here, environ=environ | {"OUT": str(out["ours"])})
    logs = "\n".join(path.read_text(errors="replace")[-2000:] for path in here.rglob("*.log"))
    assert ran.returncode == 0, ran.stdout + ran.stderr + logs
    assert len(seen(out["theirs"])) == 4
    assert seen(out["ours"]) == seen(out["theirs"])
