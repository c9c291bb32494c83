"""Programs that start a training, and the options of torchrun."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass

from hpc_mp.lint.sbatch.shell import SHELLS
from hpc_mp.lint.sbatch.word import Word

TORCHRUN = ("torchrun", "torch.distributed.run", "torch.distributed.launch")
FLAGS = frozenset({"standalone", "module", "m", "no-python", "run-path", "use-env"})  # of torchrun, without a value
HELPERS = frozenset({"-c", "-V", "--version", "pip", "venv", "json.tool"})  # a python that trains nothing
_PYTHON = re.compile(r"python[\d.]*")


@dataclass(frozen=True, slots=True)
class Torchrun:
    """Its options: name with dashes → (value, line)."""

    options: dict[str, tuple[str, int]]
    line: int

    def value(self, name: str) -> str | None:
        return self.options[name][0] if name in self.options else None


def torchrun(words: Sequence[Word]) -> Torchrun | None:
    """The torchrun among the words, if there is one."""
    at = next((at for at, word in enumerate(words) if word.base in TORCHRUN and " " not in word.text), None)
    if at is None:
        return None
    options: dict[str, tuple[str, int]] = {}
    rest = list(words[at + 1:])
    while rest and rest[0].text.startswith("-"):
        word = rest.pop(0)
        written, equals, value = word.text.lstrip("-").partition("=")
        name = written.replace("_", "-")
        if not equals and name not in FLAGS and rest:
            value = rest.pop(0).text
        options[name] = (value, word.line)
    if rest and rest[0].text.startswith("$"):  # whatever the variable holds
        options["*"] = (rest[0].text, rest[0].line)
    return Torchrun(options, words[at].line)


def is_training(words: Sequence[Word]) -> bool:
    """Whether the words start what runs for long: python with a script, a launcher, a shell script, a variable."""
    for at, word in enumerate(words):
        if word.base in (*TORCHRUN, "accelerate", "deepspeed") or (at == 0 and word.text.startswith("$")):
            return True
        if _PYTHON.fullmatch(word.base):
            return not any(each.text in HELPERS for each in words[at + 1:at + 3])
        if word.base in SHELLS:
            return any("python" in each.text or "torchrun" in each.text or each.text.endswith(".sh") or
                       each.text.lstrip().startswith("$")
                       for each in words[at + 1:])
    return False
