"""The additions of a test lab to the configuration files of every lab."""

from __future__ import annotations

from pathlib import Path

NEW = {"AuthType": "auth/slurm", "CredType": "cred/slurm", "AuthInfo": "cred_expire=5"}
"""Lines for Slurm 24.11 with a key of its own instead of munge."""


def gres_conf(directory: Path, gpus: int) -> str:
    """Return gres.conf. Slurm accepts only character devices as GPUs: they are copies of /dev/null."""
    return f"Name=gpu File={directory}/gpu[0-{gpus - 1}]\n" if gpus else ""


def passwd(machine: str, home: Path) -> str:
    """Return /etc/passwd of the lab: the machine's, with a home and a shell for nobody, the ordinary user."""
    lines = [line for line in machine.splitlines() if not line.startswith("nobody:")]
    return "\n".join([*lines, f"nobody:x:65534:65534:nobody:{home}:/bin/bash"]) + "\n"
