"""Choice of the script's command that is the program of the job: the one that runs long, on the most tasks."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace

from hpc_mp.base.launchers import MODULES
from hpc_mp.base.programs import PYTHON
from hpc_mp.cluster.slurm.option_syntax import Option, parse, syntax
from hpc_mp.launch.program.launchers import LAUNCHERS
from hpc_mp.lint.sbatch.script import Variables, assign, expanded
from hpc_mp.lint.sbatch.shell import PREFIXES, ShellAssignment, read_shell
from hpc_mp.lint.sbatch.statements import CallSite, Source, Statement
from hpc_mp.lint.sbatch.word import Word

# Commands that prepare, print and clean up: never the program of a job.
TOOLS = frozenset({
    ".", ":", "[", "[[", "alias", "apt", "awk", "aws", "basename", "bc", "bind", "break", "bunzip2", "bzip2", "case", "cat",
    "cd", "chgrp", "chmod", "chown", "clear", "clush", "column", "comm", "command", "conda", "continue", "cp", "curl", "cut",
    "date", "dd", "deactivate", "declare", "df", "diff", "dirname", "disown", "docker-compose", "du", "echo", "egrep", "enroot",
    "env", "envsubst", "eval", "exit", "export", "expr", "false", "fgrep", "file", "find", "fold", "free", "gcloud", "gdown",
    "getent", "getopts", "git", "gpustat", "grep", "gsutil", "gunzip", "gzip", "head", "hf", "hostname", "hostnamectl",
    "huggingface-cli", "id", "ifconfig", "install", "ip", "jobs", "kaggle", "kill", "killall", "let", "lfs", "ln", "local",
    "locate", "logger", "ls", "lsb_release", "lscpu", "lsof", "mail", "make", "mamba", "mapfile", "md5sum", "micromamba",
    "mkdir", "mkfifo", "mktemp", "ml", "module", "mount", "mv", "nl", "nproc", "nvcc", "nvidia-smi", "paste", "pdsh", "pgrep",
    "ping", "pip", "pip3", "pkill", "popd", "printenv", "printf", "ps", "pssh", "pushd", "pwd", "quota", "read", "readarray",
    "readlink", "readonly", "realpath", "return", "rev", "rm", "rmdir", "rocm-smi", "rsync", "sacct", "salloc", "sbatch",
    "sbcast", "scancel", "scontrol", "scp", "sed", "seff", "sendmail", "seq", "set", "sha256sum", "shift", "shopt", "shuf",
    "sinfo", "sleep", "sort", "source", "spack", "split", "squeue", "ss", "ssh", "sstat", "stat", "sync", "tac", "tail",
    "tar", "tee", "test", "time", "touch", "tr", "trap", "tree", "true", "truncate", "type", "typeset", "ulimit", "umask",
    "uname", "uniq", "unset", "until", "unxz", "unzip", "uptime", "wait", "wc", "wget", "whereis", "which", "whoami", "xargs",
    "xz", "yes", "zcat", "zip"})
HELPERS = frozenset({"-c", "-V", "--version", "pip", "venv", "json.tool", "ensurepip", "-h", "--help"})  # arguments of Python
CONTAINERS = frozenset({"apptainer", "singularity", "docker", "podman", "podman-hpc", "shifter", "enroot", "ch-run", "sarus"})
TRAINING = re.compile(r"train|tun(e|ing)|ddp|fsdp|sft|ppo|grpo|dpo|bench|launch|(?<![a-z])(run|main)", re.IGNORECASE)
AFTERWARDS = re.compile(r"(?<![a-z])(eval|test|infer|predict|generat|convert|merge|plot|summar|collect|export|preproc|prepare|"
                        r"download|build|clean)", re.IGNORECASE)
MPI = frozenset({"mpirun", "mpiexec", "mpiexec.hydra", "orterun", "prterun", "ibrun", "prun", "aprun"})


@dataclass(frozen=True, slots=True)
class LaunchCall:
    """A command that may be the program of the job.

    Attributes:
        words: its words after expansion of the script's variables, each with the number of its written word.
        options: the options of srun; empty without srun.
        program: the index in ``words`` at which the program begins, behind srun if there is one.
        statement: the number of its statement.
        tier: the likelihood that it is the program; higher is likelier.
        srun: True if srun starts it on the tasks of the job.
        together: True if it stands for several steps of one node each.
    """

    call: CallSite
    words: tuple[tuple[Word, int], ...]
    options: tuple[Option, ...]
    program: int
    statement: int
    tier: int
    srun: bool
    together: bool = False

    @property
    def texts(self) -> tuple[str, ...]:
        """The program and its arguments."""
        return tuple(word.text for word, _ in self.words[self.program:])

    def value(self, name: str) -> str | None:
        return next((option.value for option in reversed(self.options) if option.name == name), None)

    def boundary(self, at: int) -> bool:
        """Return True if a written word begins at the word number ``at``."""
        return at >= len(self.words) or not at or self.words[at][1] != self.words[at - 1][1]


def find_launches(source: Source) -> tuple[LaunchCall, ...]:
    """Return the commands that start programs, in order, with variables expanded as far as the text allows."""
    known: dict[str, tuple[Word, ...]] = {}
    found: list[LaunchCall] = []
    functions = frozenset(name for each in source.statements if (name := function_name(each)))
    for number, statement in enumerate(source.statements):
        for call in statement.calls:
            if "command_substitution" not in call.inside and "process_substitution" not in call.inside:
                own = call.command.name in functions or _answers(source, statement)
                launch = None if own else _launch(call, number, known)
                found += [launch] if launch and not any(_reads_from(launch, each) for each in found) else []
        for each in _assignments(statement):
            assign(known, each)
    return tuple(found)


def function_name(statement: Statement) -> str | None:
    """Return the name of the function that a statement defines; None if it defines none."""
    found = re.match(r"(?:function\s+)?([\w.:-]+)", statement.text) if statement.kind == "function_definition" else None
    return found[1] if found else None


def _answers(source: Source, statement: Statement) -> bool:
    """Return True for a function that is only called for its output: ``PORT=$(free_port)``."""
    name = function_name(statement)
    calls = [call for each in source.statements for call in each.calls
             if name and call.command.words[:1] and call.command.words[0].text == name]
    return bool(calls) and all("command_substitution" in call.inside for call in calls)


def _reads_from(launch: LaunchCall, first: LaunchCall) -> bool:
    """Return True if the output of ``first`` is piped through this command: ``solve | plot``."""
    return first.statement == launch.statement and first.call.start < launch.call.start < first.call.chain_end \
        and launch.call.command.name in first.call.command.piped


def _assignments(statement: Statement) -> Iterator[ShellAssignment]:
    yield from (each for each in read_shell(statement.text, statement.first).assignments if not each.captured)


def _launch(call: CallSite, statement: int, known: Variables) -> LaunchCall | None:
    arguments = list(call.arguments)
    at = 0
    while at < len(arguments) and arguments[at].word.base in ("exec", "time", "nohup", "command", "builtin", "setsid"):
        at += 1
    words = tuple((word, number) for number, argument in enumerate(arguments) if number >= at
                  for word in expanded([argument.word], known))
    if not words:
        return None
    if words[0][0].base == "eval":  # the same shell expands its words once more
        words = tuple((replace(word, text=part), number) for word, number in words[1:] for part in _SPLIT.findall(word.text))
    return _judged(call, words, statement)


_SPLIT = re.compile(r"(?:\$\(\((?:[^()]|\([^()]*\))*\)\)|\$\([^()]*\)|\S)+")


def _judged(call: CallSite, words: tuple[tuple[Word, int], ...], statement: int) -> LaunchCall | None:
    bare = [word for word, _ in words]
    skip = _wrapped(bare)
    if not bare[skip:]:
        return None
    if bare[skip].base == "srun":
        options, program = parse(bare[skip + 1:], syntax("srun"), permute=False)
        start = len(words) - len(program)
        if not program:
            return None
        return LaunchCall(call, words, options, start, statement, 1 if _tier(program) < 2 else 5, True)
    tier = _tier(bare[skip:])
    return LaunchCall(call, words, (), 0, statement, tier, False) if tier else None


def _wrapped(words: Sequence[Word]) -> int:
    """Return the number of leading words that only wrap the command behind them."""
    at = 0
    while at < len(words) and (words[at].base in PREFIXES or re.match(r"[A-Za-z_]\w*=", words[at].text)):
        values, timeout = PREFIXES.get(words[at].base, ()), words[at].base == "timeout"
        at += 1
        while at < len(words) and words[at].text.startswith("-"):
            at += 2 if words[at].text in values else 1
        at += timeout
    return at


def _tier(words: Sequence[Word]) -> int:
    """Return the tier. 5: ranks; 4: Python with a script; 3: container or shell script; 2: other program; 1: helper; 0: none."""
    skip = _wrapped(words)
    words = words[skip:]
    if not words:
        return 0
    name, texts = words[0].base, [word.text for word in words]
    if name == "ray" and {"start", "stop", "status", "logs", "list"} & set(texts[1:3]):  # these manage the program's cluster
        return 1
    if name in ("bash", "sh") and len(texts) > 2 and re.fullmatch(r"-\w*c", texts[1]):
        inner = texts[2]
        if re.match(r"\s*ray start\b", inner):
            return 1
        if re.search(r"torchrun|torch\.distributed|accelerate|deepspeed|python", inner):
            return 5
        first = re.match(r"\s*([\w./-]+)", inner)
        return 1 if first and first[1].rpartition("/")[2] in TOOLS else 3
    shell = next((at for at, word in enumerate(words) if at and word.base in ("bash", "sh")), None)
    if name in MPI and shell is not None and _tier(words[shell:]) == 1:  # it only prints host names
        return 1
    if set(texts[1:]) <= {"--version", "-V", "-version", "--help", "-h"} and texts[1:]:
        return 0
    if name in MPI and {"hostname", "date", "pwd"} & {word.base for word in words[1:]}:
        return 1
    if name in LAUNCHERS - TOOLS and not (name == "accelerate" and texts[1:2] != ["launch"]):
        return 5
    if PYTHON.fullmatch(name):
        if any(text in HELPERS for text in texts[1:3]):
            return 0 if texts[1:2] != ["-c"] else 1
        if texts[1:2] and (texts[1] == "-" or texts[1].rpartition("/")[2] == "setup.py"):
            return 1
        return 5 if any(text in MODULES for text in texts[1:5]) else 4 if len(texts) > 1 else 0
    if name in CONTAINERS:
        return 3 if {"exec", "run", "start"} & set(texts[1:4]) or name in ("shifter", "ch-run") else 0
    if name in ("bash", "sh", "zsh"):
        return 3 if len(texts) > 1 else 0
    if name in TOOLS or not name:
        return 0
    return 3 if name.endswith((".sh", ".py")) or texts[0].startswith("$") else 2


def choose(launches: Sequence[LaunchCall], source: Source, ranks: Callable[[LaunchCall], int]) -> LaunchCall | None:
    """Return the program of the job.

    Candidates are those of the highest tier with the most ranks. The last whose name suggests training wins, else the last whose
    name does not suggest work after training, else the last. A background launch before the last foreground launch is a helper,
    unless a ``wait`` follows the latter.

    Args:
        ranks: returns the number of ranks that a launch starts.
    """
    waits = max((call.start for each in source.statements for call in each.calls if call.command.name == "wait"), default=-1)
    last = max((each.call.start for each in launches if each.tier > 1 and not in_background(each, source)), default=-1)
    served = [each for each in launches if not in_background(each, source) or not each.call.start < last > waits]
    best = [each for each in served if each.tier == max(one.tier for one in served)]

    def named(each: LaunchCall) -> int:
        script = next((text for text in each.texts if re.search(r"\.(py|sh|pyz)$", text)), " ".join(each.texts[:3]))
        name = re.sub(r"(?<=[a-z])(?=[A-Z])", "_", script.rpartition("/")[2])
        return 0 if AFTERWARDS.search(name) else 2 if TRAINING.search(name) else 1

    return max(enumerate(best), key=lambda pair: (ranks(pair[1]), named(pair[1]), pair[0]))[1] if best else None


def in_background(launch: LaunchCall, source: Source) -> bool:
    """Return True if ``&`` follows a command or the statement that contains it."""
    return launch.call.command.background or source.statements[launch.statement].background
