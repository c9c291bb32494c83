"""Kinds of files, recognized by name and text: ``hpc-mp lint`` takes files, not kinds."""

import re
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Literal

from hpc_mp.base.findings import Finding
from hpc_mp.job.spec import JobSpec

Kind = Literal["jinja", "project", "job", "template", "nccl", "slurm-conf", "slurm-part", "topology", "sbatch", "variables"]
KINDS: dict[Kind, str] = {
    "sbatch": "a job script for sbatch",
    "job": "an hpc-mp job file (TOML)",
    "variables": "environment variables (output of env, NAME=VALUE lines, shell exports)",
    "nccl": "an NCCL configuration file (nccl.conf)",
    "slurm-conf": "slurm.conf",
    "slurm-part": "gres.conf or cgroup.conf",
    "topology": "topology.conf",
    "template": "an Azure CycleCloud template",
    "project": "an Azure CycleCloud project (project.ini)",
    "jinja": "a Jinja template",
}
"""The name of each kind in messages."""

_JINJA = re.compile(r"\{%-?\s*(if|for|set|include|import|from|extends|block|macro|call|raw|filter|with)\b"
                    r"|(?<!\$)\{\{-?\s*[A-Za-z_][\w.]*(\s*\|[^{}]*)?\s*-?\}\}")
_QUOTED = re.compile(r"""^(#.*)|"[^"\n]*"|'[^'\n]*'""", re.MULTILINE)
_SETTING = re.compile(r"(?:(?:export|declare -x)\s+)?[A-Za-z_]\w*=.*|setenv\s+\w+\s.*|unset\s+\w+|export\s+[\w ]+")
_SLURM_CONF = re.compile(r"^\s*(ClusterName|SlurmctldHost|NodeName|PartitionName)\s*=", re.MULTILINE | re.IGNORECASE)
_SWITCHES = re.compile(r"^\s*(Switch|Block|Ring)Name\s*=", re.MULTILINE | re.IGNORECASE)
_RECIPE: tuple[tuple[Kind, Callable[[Path, str], object]], ...] = (  # the first match counts
    # In a script, ``{{ name }}`` between quotes is text for a program, except in comments.
    ("jinja", lambda path, text: path.suffix in (".j2", ".jinja", ".jinja2") or _JINJA.search(
        _QUOTED.sub(r"\1", text) if text.startswith("#!") else text)),
    ("project", lambda path, text: path.name == "project.ini"),
    ("job", lambda path, text: path.suffix == ".toml" and set(_tables(text)) & set(JobSpec.model_fields)),
    ("nccl", lambda path, text: path.name in ("nccl.conf", ".nccl.conf")),
    ("slurm-part", lambda path, text: path.name in ("gres.conf", "cgroup.conf")),
    ("topology", lambda path, text: path.name.startswith("topology.") or _SWITCHES.search(text)),
    ("sbatch", lambda path, text: path.suffix in (".sbatch", ".slurm") or re.search(r"^#\s*SBATCH\b", text, re.MULTILINE)),
    ("template", lambda path, text: re.search(r"^\s*\[\[*\s*(cluster|node|nodearray|parameters)\b.*\]\s*$", text, re.MULTILINE)),
    ("slurm-conf", lambda path, text: path.name == "slurm.conf" or _SLURM_CONF.search(text)),
    ("variables", lambda path, text: _only_variables(text)),
    ("sbatch", lambda path, text: text.startswith("#!") or path.suffix in (".sh", ".bash")),
)

RENDER_FIRST = Finding("HM001", "error", "", "a template: its placeholders are not filled in yet.",
                       "Render it, and check the result.")


def kind_of(path: Path, text: str) -> Kind | None:
    """Return the kind of a file; None if no kind in ``KINDS`` matches."""
    return next((kind for kind, holds in _RECIPE if holds(path, text)), None)


def _tables(text: str) -> dict[str, object]:
    """Return the tables of a TOML file; for a broken file, those with a readable header."""
    try:
        return tomllib.loads(text)
    except tomllib.TOMLDecodeError:
        return dict.fromkeys(re.findall(r"^\[(\w+)\]", text, re.MULTILINE))


def _only_variables(text: str) -> bool:
    """Return True if a file has lines other than comments, and each sets or unsets a variable. Functions in env are ignored."""
    plain = re.sub(r"^BASH_FUNC_.*?^}$", "", text, flags=re.MULTILINE | re.DOTALL)
    lines = [line.strip() for line in plain.splitlines() if line.strip() and not line.lstrip().startswith("#")]
    return bool(lines) and all(map(_SETTING.fullmatch, lines))
