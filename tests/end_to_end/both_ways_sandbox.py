"""The sandbox of a script that runs both ways: its directories, the stand-ins for its programs, and what the directives ask for.

``scaled`` is applied to the script before both runs. It changes the lines with ``#SBATCH`` alone, and none of the body:

- taken away is what the lab does not have or what would act outside of it: the options of ``DROPPED``, an absolute ``--chdir``,
  and generic resources other than GPUs. A directive of which nothing is left becomes an empty comment: lines keep their numbers;
- made smaller: nodes to 2, tasks per node to 2, tasks to 4, CPUs per task to 8, GPUs to 4 (8 in all, 2 per task), memory to 64 GB
  (1 GB per CPU, 4 GB per GPU), an array to its first element; a GPU's type is taken away;
- added, after the first line: the partition of the sandbox's own hosts.
"""

import os
import re
import shlex
import shutil
import sys
import tomllib
from pathlib import Path

from both_ways_recorder import MPIRUNS, SLURM
from tables import table

from hpc_mp.base.assets import asset
from hpc_mp.base.launchers import LAUNCHERS
from hpc_mp.cluster.slurm.option_syntax import PlainWord, parse, syntax
from hpc_mp.lint.sbatch.script import read_script


def _names(text: str) -> frozenset[str]:
    return frozenset(text.split())


# Programs that are recorded even where they exist: they reach the network, take long, or tell what differs from run to run.
PROGRAMS = _names(table(__file__, "both_ways_sandbox.toml", "programs")) | {*SLURM, *MPIRUNS, *LAUNCHERS} - {"srun"}
BUILTINS = _names(table(__file__, "both_ways_sandbox.toml", "builtins"))
DROPPED = _names(table(__file__, "both_ways_sandbox.toml", "dropped"))
LIMITS = {"nodes": 2, "ntasks-per-node": 2, "ntasks": 4, "cpus-per-task": 8, "gpus": 8, "gpus-per-node": 4, "gpus-per-task": 2,
          "gres": 4}
MEMORY = {"mem": 64000, "mem-per-cpu": 1000, "mem-per-gpu": 4000}


def scaled(text: str, partition: str) -> str:
    """Return a script with directives that the lab can satisfy."""
    lines = text.split("\n")
    for number, line in enumerate(lines[1:], start=1):
        if (match := re.match(r"#SBATCH\s+(.*)", line)) is not None:
            lines[number] = _directive(match[1])
        elif line.strip() and not line.lstrip().startswith("#"):
            break
    return "\n".join([lines[0], f"#SBATCH --partition={partition}", *lines[1:]]) if lines[0].startswith("#!") else text


def _directive(text: str) -> str:
    try:
        words = shlex.split(text, comments=True)
    except ValueError:
        return f"#SBATCH {text}"
    if not words or not words[0].startswith("-"):
        return f"#SBATCH {text}"
    options, rest = parse([PlainWord(word) for word in words], syntax("sbatch"), permute=True)
    changed = [(option.name, _value(option.name, option.value)) for option in options]
    if changed == [(option.name, option.value) for option in options]:
        return f"#SBATCH {text}"
    words = [f"--{name}" if value is None else f"--{name}={value}" for name, value in changed if value != ""]
    remaining = shlex.join([*words, *(word.text for word in rest)])
    return f"#SBATCH {remaining}" if remaining else "#"


def _value(name: str, value: str | None) -> str | None:
    """Return the value of an option that the lab can satisfy; empty if the option goes."""
    if name in DROPPED or (name == "chdir" and (value or "").startswith(("/", "~", "$"))):
        return ""
    if value is None:
        return None
    if name == "array":
        return re.split(r"[-,:%]", value)[0]
    if name in MEMORY and (match := re.fullmatch(r"(\d+)([KMGT]?)B?", value, re.IGNORECASE)):
        size = int(match[1]) * {"K": 1 / 1024, "": 1, "M": 1, "G": 1024, "T": 1 << 20}[match[2].upper()]
        return value if size <= MEMORY[name] else f"{MEMORY[name]}M"
    if name not in LIMITS:
        return value
    if name == "gres":
        if re.match(r"(gres/)?gpu\b", value) is None:
            return ""
        count = re.search(r"[:=](\d+)(\(|$)", value.split(",")[0])
        return f"gpu:{min(int(count[1]) if count else 1, LIMITS[name])}"
    if name.startswith("gpus"):
        value = value.split(",")[0].rpartition(":")[2]
    if re.fullmatch(r"[\d-]+", value):
        return re.sub(r"\d+", lambda number: str(min(int(number[0]), LIMITS[name])), value)
    return value


class Sandbox:
    """The directories of one script: ``work``, where it is submitted, ``home``, ``bin`` with the stand-ins, ``seen``.

    They have the same paths in both ways, and are made anew before each.
    """

    def __init__(self, top: Path, owner: tuple[int, int]) -> None:
        self.top, self.owner = top, owner
        self.work, self.home, self.seen, self.bin = (top / name for name in ("work", "home", "seen", "bin"))

    def make(self, name: str, text: str, seed: int) -> None:
        """Make the directories for a script, with stand-ins for the programs that its text names."""
        shutil.rmtree(self.top, ignore_errors=True)
        for path in (self.top, self.work, self.home, self.seen, self.bin):
            path.mkdir(parents=True)
            os.chown(path, *self.owner)
        recorder = self.top / "recorder.py"
        interpreter = os.path.realpath(sys.executable)
        recorder.write_text(f"#!{interpreter} -IS\n" + (Path(__file__).parent / "both_ways_recorder.py").read_text())
        recorder.chmod(0o755)
        (self.top / "seed").write_text(str(seed))
        table = tomllib.loads(asset("slurm/mpirun-options.toml").read_text(encoding="utf-8"))
        values = {option: count for count, key in enumerate(("none", "one", "two")) for option in table[key]}
        (self.top / "mpirun-options").write_text(repr(values))
        (self.home / ".bash_profile").write_text(f"export PATH={self.bin}:$PATH FROM_PROFILE=1\n")  # for `#!/bin/bash -l`
        (self.work / name).write_bytes(text.encode(errors="surrogateescape"))
        os.chown(self.work / name, *self.owner)
        for program in {*PROGRAMS, "in-a-file", *programs(text)}:
            self._stand_in(program, recorder)
        for file in set(re.findall(r"(?<![\w./$}~-])(?:\./)?([A-Za-z0-9_][\w/-]*\.(?:py|sh|bash))\b", text)) - {name}:
            self._write(self.work / file, "in-a-file \"$@\"\n")

    def _write(self, path: Path, text: str) -> None:
        """Write a script that the job's script may run or source."""
        if not path.exists() and not any(parent.is_symlink() or parent.is_file() for parent in path.parents):
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
            for parent in (path, *path.relative_to(self.work).parents):
                os.chown(self.work / parent, *self.owner)

    def _stand_in(self, program: str, recorder: Path) -> None:
        path = (self.work / program if "/" in program else self.bin / program).absolute()
        if not Path(os.path.normpath(path)).is_relative_to(self.top) or path.exists():
            return
        path.parent.mkdir(parents=True, exist_ok=True)
        path.symlink_to(recorder)
        if "/" in program:
            for parent in (path, *path.relative_to(self.work).parents):
                os.chown(self.work / parent, *self.owner, follow_symlinks=False)

    def environ(self) -> dict[str, str]:
        """Return the variables of the shell that submits the script."""
        return {"HOME": str(self.home), "USER": "nobody", "LOGNAME": "nobody", "SHELL": "/bin/bash", "LANG": "C.UTF-8",
                "PATH": f"{self.bin}:/usr/local/bin:/usr/bin:/bin", "LR": "3e-4", "TRICKY": "a b  'c' \"d\" $HOME *.none\n2nd"}


def programs(text: str) -> set[str]:
    """Return the programs that a script names and that do not exist here; relative paths among them."""
    names = set()
    try:
        commands = read_script(text.replace("\0", ""), directory=Path("/"), version=None).shell.commands
    except (ValueError, RecursionError):
        commands = ()
    for command in commands:
        words = [word.text for word in command.words]
        names |= {words[0]} if words else set()
    functions = set(re.findall(r"^\s*(?:function\s+)?([\w-]+)\s*\(\)", text, re.MULTILINE))
    plain = {name for name in names if re.fullmatch(r"(\./)?[A-Za-z0-9_][\w.+/-]*", name) and name not in BUILTINS | functions}
    return {name for name in plain if not name.endswith("/") and ("/" in name or shutil.which(name) is None)}
