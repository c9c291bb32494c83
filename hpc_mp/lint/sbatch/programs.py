"""Programs that start a training, and the options of launchers that start the ranks of a node."""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpc_mp.lint.sbatch.shell import SHELLS
from hpc_mp.lint.sbatch.word import Word

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
FLAGS = frozenset({"standalone", "module", "m", "no-python", "run-path", "use-env"})  # options of torchrun without a value
HELPERS = frozenset({"-c", "-V", "--version", "pip", "venv", "json.tool"})  # arguments of a python call that does not train
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Torchrun:
    """A torchrun call. ``options`` maps dashed names to (value, line)."""

    options: dict[str, tuple[str, int]]
    line: int

    def value(self, name: str) -> str | None:
        return self.options[name][0] if name in self.options else None


def torchrun(words: Sequence[Word]) -> Torchrun | None:
    """Return the torchrun call in the words; None without one."""
    at = next((at for at, word in enumerate(words) if word.base in TORCHRUN and " " not in word.text), None)
    if at is None:
        return None
    return Torchrun(_options(words[at + 1:], FLAGS), words[at].line)


def _options(words: Sequence[Word], flags: Collection[str]) -> dict[str, tuple[str, int]]:
    """Return the options before the first positional word: dashed name → (value, line). ``flags`` have no value."""
    options: dict[str, tuple[str, int]] = {}
    rest = list(words)
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0)
        written, equals, value = word.text.lstrip("-").partition("=")
        name = written.replace("_", "-")
        if not equals and name not in flags and rest:
            value = rest.pop(0).text
        options[name] = (value, word.line)
    if rest and rest[0].text.startswith("$"):  # the variable may hold any option
        options["*"] = (rest[0].text, rest[0].line)
    return options


@dataclass(frozen=True, slots=True)
class NodeLauncher:
    """A program that starts the ranks of a node.

    Attributes:
        name: the name of the command: ``torchrun``, ``accelerate launch``, ``deepspeed``.
        machines: the number of nodes in its options; "" without it.
        rank: the number of this node; "" without it.
        per_node: the number of processes to start per node; "" without it.
        elsewhere: True if a file or a variable may set the missing values.
        options: as in ``Torchrun``.
    """

    name: str
    machines: str
    rank: str
    per_node: str
    elsewhere: bool
    options: dict[str, tuple[str, int]]
    line: int


_LAUNCHERS = {  # options for nodes, node rank and processes; options that set them by other means; flags
    "accelerate": ("num-machines", "machine-rank", "", ("config-file", "*"), (
        "multi-gpu", "cpu", "tpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "same-network", "m", "module", "no-python",
        "debug", "quiet", "q")),
    "deepspeed": ("num-nodes", "node-rank", "num-gpus", ("hostfile", "H", "launcher", "no-ssh", "include", "i", "*"), (
        "no-ssh", "force-multi", "module", "no-python", "save-pid", "no-local-rank")),
}


def node_launcher(words: Sequence[Word]) -> NodeLauncher | None:
    """Return the launcher of a node's ranks in the words; None without one."""
    if call := torchrun(words):
        name = next(word.base for word in words if word.base in TORCHRUN)
        return NodeLauncher(name, call.value("nnodes") or "", call.value("node-rank") or "",
                            call.value("nproc-per-node") or "", "*" in call.options, call.options, call.line)
    for at, word in enumerate(words):
        launch = [following.text for following in words[at + 1:at + 2]] == ["launch"]
        if (word.base == "deepspeed" or (word.base == "accelerate" and launch)) and " " not in word.text:
            nodes, rank, processes, others, flags = _LAUNCHERS[word.base]
            options = _options(words[at + 1 + (word.base == "accelerate"):], flags)
            values = {name: options.get(name, ("", 0))[0] for name in (nodes, rank, processes)}
            name = "accelerate launch" if word.base == "accelerate" else word.base
            return NodeLauncher(name, values[nodes], values[rank], values[processes],
                                any(other in options for other in others), options, word.line)
    return None


def is_training(words: Sequence[Word]) -> bool:
    """Return True if the words start a long-running program: python with a script, a launcher, a shell script, a variable."""
    for at, word in enumerate(words):
        if word.base in (*TORCHRUN, "accelerate", "deepspeed") or (at == 0 and word.text.startswith("$")):
            return True
        if _PYTHON.fullmatch(word.base):
            return not any(argument.text in HELPERS for argument in words[at + 1:at + 3])
        if word.base in SHELLS:
            return any("python" in argument.text or "torchrun" in argument.text or argument.text.endswith(".sh") or
                       argument.text.lstrip().startswith("$")
                       for argument in words[at + 1:])
    return False
