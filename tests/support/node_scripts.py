"""slurm/node-start.sh and node-end.sh, run as srun would run them on one node."""

import json
import os
import subprocess
from pathlib import Path

from hpc_mp.base.assets import asset

TOKEN = f"7.0.{os.getpid()}"  # no process of tests beside these has it
ODD = "a run's \"odd\" $(place) & co"


class Node:
    """A node: its own disk, and the run directory."""

    def __init__(self, base: Path) -> None:
        self.run = base / ODD
        self.run.mkdir()
        self.job = base / "own disk" / "hpc-mp-0" / "7.0"
        (self.run / "log").mkdir()
        self.begin(TOKEN)

    def begin(self, token: str) -> None:
        self.token = token
        (self.run / "attempt.json").write_text(json.dumps({"token": token, "attempt": 1}, indent=1))

    def bash(self, script: str, *arguments: object, **environ: object) -> subprocess.CompletedProcess[str]:
        given = {"HPC_MP_LOCAL": self.job, "SLURMD_NODENAME": "n3", "HPC_MP_PATIENCE": 0} | environ
        command = ["bash", asset(f"slurm/{script}"), self.run, self.token, *map(str, arguments)]
        return subprocess.run(command, env=os.environ | {name: str(value) for name, value in given.items()},
                              capture_output=True, text=True)

    def start(self, *arguments: object, **environ: object) -> str:
        """Run a start that must succeed, and return its stderr."""
        done = self.bash("node-start.sh", *arguments, **environ)
        assert done.returncode == 0, done.stderr
        return done.stderr

    def refused(self, *arguments: object, **environ: object) -> str:
        done = self.bash("node-start.sh", *arguments, **environ)
        assert done.returncode == 2
        assert done.stderr.startswith("hpc-mp: n3: ") and done.stderr.count("\n") == 1
        return done.stderr

    def end(self, how: str) -> None:
        done = self.bash("node-end.sh", how)
        assert (done.returncode, done.stderr) == (0, "")

    @property
    def facts(self) -> dict[str, object]:
        found = json.loads((self.run / "nodes" / "n3.json").read_text())
        assert isinstance(found, dict)
        return found
