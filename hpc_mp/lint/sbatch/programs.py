"""Programs that start a training, and the options of launchers that start the ranks of a node."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass

from hpc_mp.base.launchers import LAUNCHERS, MODULES
from hpc_mp.base.programs import PYTHON
from hpc_mp.lint.sbatch.shell import SHELLS, Word

HELPERS = frozenset({"-c", "-V", "--version", "pip", "venv", "json.tool"})  # arguments of a python call that does not train
STARTERS = ("python", "torch.distributed", *(name for name, launcher in LAUNCHERS.items() if launcher.of_node))


@dataclass(frozen=True, slots=True)
class NodeLauncher:
    """A program that starts the ranks of a node."""

    key: str  # its key in ``LAUNCHERS``
    name: str  # its command as the script has it: ``torchrun``, ``torch.distributed.run``, ``accelerate launch``
    machines: str  # the number of nodes in its options; "" without it
    rank: str  # the number of this node; "" without it
    per_node: str  # the number of processes to start per node; "" without it
    elsewhere: bool  # True if a file or a variable may set the missing values
    options: dict[str, tuple[str, int]]  # dashed name → (value, line)
    line: int

    def option(self, name: str) -> tuple[str, int]:
        """Return an option's value and line; ("", 0) without it."""
        return self.options.get(name, ("", 0))

    @property
    def alone(self) -> bool:
        """True if its options name no other node."""
        return self.machines in ("", "1", "1:1")

    @property
    def meets(self) -> bool:
        """True if its nodes meet on a server that numbers them as they arrive."""
        return self.option("rdzv-backend")[0] in ("c10d", "etcd", "etcd-v2")


def node_launcher(words: Sequence[Word]) -> NodeLauncher | None:
    """Return the launcher of a node's ranks in the words; None without one."""
    for at, word in enumerate(words, start=1):
        key = _launcher_of_node(word)
        if key is None:
            continue
        launcher, rest = LAUNCHERS[key], words[at:]
        if launcher.verb and word.base == key:
            if not rest or rest[0].text != launcher.verb:
                continue
            rest = rest[1:]
        options = _options(rest, launcher.flags)
        machines, rank, per_node = (options.get(name, ("", 0))[0] for name in (
            launcher.nodes, launcher.node_rank, launcher.per_node))
        return NodeLauncher(key, f"{key} {launcher.verb}" if launcher.verb else word.base, machines, rank, per_node,
                            any(name in options for name in launcher.elsewhere), options, word.line)
    return None


def _launcher_of_node(word: Word) -> str | None:
    """Return the key of a launcher of a node's ranks, if the word is its name or module."""
    key = MODULES.get(word.base, word.base)
    return key if " " not in word.text and key in LAUNCHERS and LAUNCHERS[key].of_node else None


def torchrun(words: Sequence[Word]) -> NodeLauncher | None:
    """Return the torchrun call in the words; None without one."""
    launcher = node_launcher(words)
    return launcher if launcher is not None and launcher.key == "torchrun" else None


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


def is_training(words: Sequence[Word]) -> bool:
    """Return True if the words start a long-running program: python with a script, a launcher, a shell script, a variable."""
    for at, word in enumerate(words):
        if _launcher_of_node(word) is not None or (at == 0 and word.text.startswith("$")):
            return True
        if PYTHON.fullmatch(word.base):
            return not any(argument.text in HELPERS for argument in words[at + 1:at + 3])
        if word.base in SHELLS:
            return any(argument.text.endswith(".sh") or argument.text.lstrip().startswith("$") or
                       any(name in argument.text for name in STARTERS) for argument in words[at + 1:])
    return False
