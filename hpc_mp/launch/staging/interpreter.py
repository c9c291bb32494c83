"""The environment of a Python interpreter: a virtual environment, a conda prefix, a separate Python, or the system's."""

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from hpc_mp.base.command import CommandFailed, Runner, ask
from hpc_mp.base.errors import HpcMpError

SYSTEM = (Path("/usr"), Path("/usr/local"))  # on every node's local disk, and too much to pack
ASK_S = 60.0  # a cold file system may take long to start Python
QUESTION = """\
import json, os, platform, sys
print(json.dumps([sys.prefix, sys.base_prefix, platform.python_version(), sys.executable,
                  *(path for path in sys.path if path.endswith("-packages") and os.path.isdir(path))]))
"""


@dataclass(frozen=True, slots=True)
class Interpreter:
    """An installed Python.

    Attributes:
        prefix: the environment's directory.
        base: prefix of the Python it was made with; the same if it is not a virtual environment.
        version: "3.11.7".
        executable: its path, as it reports it.
        libraries: directories from which it imports installed packages, without the user's own (``~/.local``).
    """

    prefix: Path
    base: Path
    version: str
    executable: Path
    libraries: tuple[Path, ...]

    @property
    def packs_base(self) -> bool:
        """True if its standard library is on a shared file system too, so that it must be packed."""
        return self.base != self.prefix and self.base not in SYSTEM

    @property
    def unseen_libraries(self) -> tuple[Path, ...]:
        """Packages installed beside the base's standard library that the environment does not import."""
        return tuple(path for path in self.base.glob("lib/python*/site-packages") if path not in self.libraries)


def interpreter(python: Sequence[str], run: Runner = lambda argv: ask(argv, ASK_S)) -> Interpreter:
    """Query the ranks' interpreter for its environment. ``python``: its command, for example its path. Raises HpcMpError if it
    does not run, or it is the system's."""
    try:
        answer = json.loads(run((*python, "-I", "-c", QUESTION)))
    except (CommandFailed, ValueError) as error:
        raise HpcMpError(f"environment.stage: the interpreter {python[0]}", f"does not say what it is ({error})",
                         "name a working one in slurm.python, slurm.venv or slurm.conda") from None
    prefix, base, version, executable, *libraries = answer
    installation = Interpreter(Path(prefix), Path(base), version, Path(executable), tuple(map(Path, libraries)))
    if installation.prefix in SYSTEM:
        raise HpcMpError(f"environment.stage with the system's Python {executable}", "cannot be packed apart from the system",
                         f"install into a virtual environment ({executable} -m venv DIRECTORY) and name it in slurm.venv")
    return installation
