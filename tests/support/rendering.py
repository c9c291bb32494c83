"""Jobs whose scripts are tested, their golden files, and the reading of a script by bash and sbatch.

``python tests/support/rendering.py`` rewrites the golden files.
"""

import functools
import os
import re
import shutil
import subprocess
import tomllib
from pathlib import Path
from typing import Any

from tables import table

from hpc_mp.base.assets import asset
from hpc_mp.cluster.slurm.releases import Version, print_version, releases
from hpc_mp.job import AnySpec, resolve, resolve_any
from hpc_mp.job.sweep import runs_of
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.render import render, script

# Hundreds of scripts are rendered here, of one template: it is compiled once.
JINJA = script._jinja()
JINJA.compile = functools.cache(JINJA.compile)  # type: ignore[method-assign]
script._jinja = lambda: JINJA

GOLDEN = Path(__file__).parents[1] / "golden" / "sbatch"
RUN = Path("/scratch/runs/job/0001")
PYTHON = "/opt/hpc-mp/bin/python"
CPU = {"device": "cpu"}
GPUS = {"device": "cuda", "nodes": 4, "ranks_per_node": 8}
# Nodes that exist only in slurm.conf, powered down in a cloud: sbatch --test-only takes them into account.
BIG = "CPUs=128 Sockets=2 CoresPerSocket=32 ThreadsPerCore=2 RealMemory=512000 Feature=a100,ib,big State=CLOUD"
CONF = {"NodeName": f"h[1-4] {BIG} Gres=gpu:h100:8", f"NodeName=a[1-6] {BIG} Gres": "gpu:a100:8",
        "PartitionName": "gpu Nodes=h[1-4] State=UP", "TopologyPlugin": "topology/none", "Licenses": "fs:4",
        "SuspendProgram": "/bin/true", "ResumeProgram": "/bin/true", "SuspendTime": "3600"}

# form: the contents of the job file. Each is rendered for each release.
FORMS: dict[str, dict[str, Any]] = tomllib.loads(GOLDEN.with_name("forms.toml").read_text(encoding="utf-8"))


def job(**sections: Any) -> AnySpec:
    if "program" in sections:
        return resolve_any(sections | {"job": {"directory": "/scratch/runs"} | sections.get("job", {})}, Path("/"))
    tree = {"model": {"config": {"model_type": "gpt2"}}, "data": {"files": ["/scratch/corpus/*.txt"], "sequence_length": 8},
            "train": {"steps": 1, "global_batch": 96}, "job": {}}
    tree |= sections
    tree["job"] = {"directory": "/scratch/runs"} | tree["job"]
    return resolve(tree, Path("/"))


def facts(version: Version | None = None, **more: Any) -> ClusterFacts:
    """Return the facts of a cluster of nodes with 64 cores of two threads."""
    return ClusterFacts(version, **{"cpus": 128, "threads_per_core": 2, "topology": "topology/tree"} | more)


def text(spec: AnySpec, run: Path = RUN, known: ClusterFacts | None = None) -> str:
    return render(spec, run, known, python=PYTHON).text


def form(name: str, version: Version | None, **sections: Any) -> str:
    spec = job(**FORMS[name] | sections)
    runs = [RUN.with_name(f"{number:04d}") for number in range(1, max(1, len(runs_of(spec.sweep))) + 1)]
    return render(spec, runs, facts(version), python=PYTHON).text


def golden(name: str, version: Version) -> Path:
    """Return the golden file of a form for a release: its own, else that of the nearest earlier release."""
    kept = (GOLDEN / f"{name}.{print_version(known)}.sbatch" for known in reversed(releases()) if known <= version)
    return next((path for path in kept if path.exists()), GOLDEN / f"{name}.{print_version(releases()[0])}.sbatch")


def write_golden() -> None:
    for path in GOLDEN.glob("*.sbatch"):
        path.unlink()
    for name in FORMS:
        for version in releases():
            script, known = form(name, version), golden(name, version)
            if not known.exists() or known.read_text(encoding="utf-8") != script:
                (GOLDEN / f"{name}.{print_version(version)}.sbatch").write_text(script, encoding="utf-8")


# --- as bash runs it --------------------------------------------------------------------------------------------------

# All stand-ins are bash scripts: they start quickly, and paths may have blanks.
# The launching interpreter, as the host program: records its arguments and starts the command after "--".
FAKE_HOST = table(__file__, "rendering.toml", "fake_host")
# The command that srun starts follows its options and those of a container's command.
FAKE_SRUN = """#!/bin/bash
until [[ $1 == bash ]]; do shift; done
exec "$@"
"""
FAKE_RANK = table(__file__, "rendering.toml", "fake_rank")
SAYS = """#!/bin/sh
printf '%s\\0' "$0" "$@" >> "$RECORD.said"
"""


def executable(path: Path, content: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(content)
    path.chmod(0o755)
    return path


def execute(folder: Path, script: str, run: Path, **environ: str) -> dict[str, Any]:
    """Run a script as the batch host does, with stand-ins for srun and the rank, and return the input of each."""
    bin = folder / "bin"
    executable(bin / "srun", FAKE_SRUN)
    for name in ("module", "apptainer"):
        executable(bin / name, SAYS)
    run.mkdir(parents=True, exist_ok=True)
    shutil.copy(asset("slurm/clean-environment.sh"), run)
    path, record = folder / "job.sbatch", folder / "record"
    path.write_text(script, encoding="utf-8")
    done = subprocess.run(["bash", str(path)], cwd=folder, timeout=60, capture_output=True, text=True, env={
        "PATH": f"{bin}:/usr/bin:/bin", "HOME": "/nowhere", "USER": "ann", "LANG": "C.UTF-8", "RECORD": str(record),
        "SLURM_JOB_ID": "4242", "SLURM_JOB_NODELIST": "n[1-4]"} | environ)

    def words(kind: str) -> list[str]:
        found = Path(f"{record}.{kind}")
        return found.read_bytes().decode().split("\0")[:-1] if found.exists() else []

    argv = words("argv")
    at = argv.index("--") if argv else 0
    seen: dict[str, Any] = {"code": done.returncode, "stderr": done.stderr, "host": argv[:at], "srun": argv[at + 1:],
                            "env": dict(word.split("=", 1) for word in words("env")), "said": words("said"),
                            "rank": words("rank")}
    if argv:
        seen["cwd"] = Path(f"{record}.cwd").read_text(encoding="utf-8").removesuffix("\n")
    if seen["rank"]:
        seen["tmp"] = Path(f"{record}.tmp").read_text(encoding="utf-8")
        seen["ignored"] = int(Path(f"{record}.ignored").read_text(), 16)
    return seen


# --- as sbatch reads it -----------------------------------------------------------------------------------------------


# A part of a word, as ``get_argument`` of src/sbatch/opt.c reads it: an escaped character, a quotation, another character.
PART = re.compile(r"""\\(\S?)|(["'])((?:\\.|(?!\2)[^\\])*)\2|([^\s#"'\\])""", re.DOTALL)


def read_by_sbatch(line: str) -> list[str]:
    """Return the words of a directive."""
    words: list[str] = []
    while line := line.lstrip():
        parts = []
        while match := PART.match(line):
            parts.append(match[1] or match[4] or re.sub(r"\\(.)", r"\1", match[3] or "", flags=re.DOTALL))
            line = line[match.end():]
        assert not line.startswith(("'", '"')), "Unmatched quote"
        words += ["".join(parts)] if parts else []
        if line.startswith("#"):
            break
    return words


def directives(script: str) -> list[str]:
    """Return the words of all directives before the first command, as sbatch gets them."""
    head = re.split(r"^(?!#|$)", script, maxsplit=1, flags=re.M)[0]
    return [word for line in head.splitlines() if line.startswith("#SBATCH") for word in read_by_sbatch(line[7:])]


if __name__ == "__main__":
    os.chdir(GOLDEN)
    write_golden()
