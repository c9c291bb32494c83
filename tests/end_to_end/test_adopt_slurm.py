"""A script, and the job that was made of it, both on a real Slurm: the same words, directory, variables, input and place of each
task, the same exit code, and a cause when it fails."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest
from lab_runs import ON_SLURM, ended, hpc_mp, newest
from slurm_lab.lab import Lab

from hpc_mp.rundir import RunDirectory

# What a process got: its words, directory, variables and input, and the task that it is.
SEEN = """import json, os, sys
task, step = os.environ.get("SLURM_PROCID", "batch"), os.environ.get("SLURM_STEP_ID", "batch")
read = "" if os.isatty(0) else sys.stdin.read()
place = (step, task, os.environ.get("SLURMD_NODENAME"))
with open(f"{os.environ['OUT']}/{step}.{task}.json", "w") as file:
    json.dump([sys.argv[1:], os.getcwd(), dict(os.environ), read, place], file)
print("out", *sys.argv[1:])
if "fail" in sys.argv and task == sys.argv[sys.argv.index("fail") + 1]:
    raise ValueError("no such layer")
"""
HEAD = "#!/bin/bash\n#SBATCH --nodes=2\n#SBATCH --time=5\n"
SCRIPTS = {
    "sizes that differ": "#SBATCH -n 3\nPYTHON seen.py first\nsrun PYTHON seen.py --lr $LR \"a b\" '$HOME' é $SLURM_NTASKS\n",
    "loop and function": "#SBATCH --ntasks-per-node=2\nf() { srun -l PYTHON seen.py \"$@\"; }\nfor i in 1 2; do f $i; done\n",
    "parallel": "#SBATCH -n 4\nsrun --exact -N1 -n1 PYTHON seen.py a &\nsrun --exact -N1 -n1 PYTHON seen.py b &\nwait\n",
    "branch": "#SBATCH -n 2\nmkdir -p sub; cd sub\nif srun false; then :; else srun PYTHON ../seen.py no; fi\n",
    "components": "#SBATCH -n 2\nsrun -n1 PYTHON seen.py server : -n1 PYTHON seen.py client\n",
    "input": "#SBATCH --ntasks=2\nsrun -n1 PYTHON seen.py <<EOF\n$USER line\nEOF\nsrun --input=seen.txt PYTHON seen.py\n",
    "directory and program": "#SBATCH --ntasks=2\nmkdir -p sub\nsrun --chdir=sub PYTHON ../seen.py x && PYTHON seen.py post\n",
    "multi-prog": "#SBATCH --ntasks=2\nprintf '0 PYTHON seen.py zero\\n1 PYTHON seen.py one\\n' >conf\nsrun --multi-prog conf\n",
    "bash -c": "#SBATCH --ntasks-per-node=2\nsrun bash -c 'PYTHON seen.py of $SLURM_PROCID'\n",
    "torchrun": "#SBATCH --ntasks-per-node=1\nsrun PYTHON -m torch.distributed.run --nnodes 1 --nproc_per_node 1 seen.py x\n",
    "exit code": "#SBATCH --ntasks=2\nsrun PYTHON seen.py x\nexit 7\n",
    "set -e": "#SBATCH --ntasks=2\nset -e\nsrun PYTHON seen.py fail 1\nsrun PYTHON seen.py never\n",
}
DIFFER = {"PATH", "BASH_ENV", "SLURM_TASK_PID", "OUT", "_", "SHLVL", "SLURM_STEP_ID", "SLURM_STEPID"}
OF_ONE_JOB = ("HPC_MP_", "XDG_", "SLURM_SRUN_COMM", "SLURM_STEP_LAUNCHER", "PMI", "TORCHELASTIC", "MASTER_PORT")


@pytest.fixture
def here(here: Path) -> Path:
    (here / "seen.py").write_text(SEEN)
    (here / "seen.txt").write_text("a file\n")
    return here


def seen(directory: Path) -> list[object]:
    """What the processes of a job got, without what differs from job to job; the numbers of its steps are others too."""
    got = []
    for path in sorted(directory.glob("*.json")):
        words, where, variables, read, place = json.loads(path.read_text())
        for name in [*variables]:
            if name in DIFFER or name.startswith(OF_ONE_JOB) or any(part in name for part in ("JOBID", "JOB_ID", "TIME")):
                del variables[name]
        got.append((words, where, variables, read, place[1:]))
    return sorted(got, key=lambda process: json.dumps(process, sort_keys=True))


def both(lab: Lab, here: Path, name: str) -> tuple[list[object], str, list[object], RunDirectory]:
    """The script by sbatch, and adopted: the processes of both, the exit code of the first, and the run of the second."""
    script = here / "job one.sbatch"
    script.write_text(HEAD + SCRIPTS[name].replace("PYTHON", sys.executable))
    for out in ("plain", "adopted"):
        (here / out).mkdir()
        (here / out).chmod(0o777)
    environ = {"XDG_STATE_HOME": str(here / "state"), "LR": "3e-4"}
    words = ["sbatch", "--wait", "--parsable", script.name]
    plain = lab.run(words, user="nobody", cwd=here, timeout=300, environ=environ | {"OUT": str(here / "plain")})
    environ["OUT"] = str(here / "adopted")
    hpc_mp(lab, here, "adopt", script.name, "-o", "job.toml", user="nobody", environ=environ)
    ours = hpc_mp(lab, here, "launch", "job.toml", *ON_SLURM, "--wait", user="nobody", environ=environ)
    assert (plain.returncode == 0) == (ours.returncode == 0), ours.stdout + ours.stderr
    return seen(here / "plain"), str(plain.returncode), seen(here / "adopted"), newest(here)


def difference(plain: list[object], adopted: list[object]) -> list[str]:
    """The words of both that differ, for the message of a failure."""
    lines = [set(json.dumps(process, indent=0, sort_keys=True).splitlines()) for process in (*plain, *adopted)]
    return sorted(set().union(*lines[:len(plain)]) ^ set().union(*lines[len(plain):]))


@pytest.mark.prove
@pytest.mark.parametrize("name", SCRIPTS)
def test_each_process_gets_what_it_gets_by_sbatch(name: str, lab: Lab, here: Path) -> None:
    plain, code, adopted, run = both(lab, here, name)
    assert plain and adopted == plain, "\n".join((*difference(plain, adopted), run.srun_log.read_text()))
    end = ended(run)
    assert (end.state == "completed") == (code == "0")
    for word in {"set -e": ("rank 1", "no such layer"), "exit code": ("7",)}.get(name, ()):
        assert end.cause is not None and word in end.cause.message
