"""What scripts left on a machine: its files with their modes and contents, to compare one time with the next."""

import hashlib
import os
from collections.abc import Iterable
from pathlib import Path

PASSING = ("opt/cycle/jetpack", "mnt/cluster-init", "var/log", "var/cache", "var/lib/munge", "spool/", "root/.cache")
"""What jetpack, logs and daemons write by themselves."""


def tree(root: Path, skip: Iterable[str] = PASSING) -> dict[str, str]:
    """`path: mode and digest or target of a link` of every file below it; times do not count. `skip`: parts of paths."""
    found = {}
    for directory, names, files in os.walk(root):
        for name in (*names, *files):
            path = Path(directory, name)
            shown = str(path.relative_to(root))
            if not any(part in shown for part in skip):
                found[shown] = _state(path)
    return found


def differences(before: dict[str, str], after: dict[str, str]) -> list[str]:
    return sorted(f"{path}: {before.get(path, 'not there')} -> {after.get(path, 'not there')}"
                  for path in before.keys() | after.keys() if before.get(path) != after.get(path))


def _state(path: Path) -> str:
    mode = f"{path.lstat().st_mode:o} {path.lstat().st_uid}:{path.lstat().st_gid}"
    if path.is_symlink():
        return f"{mode} -> {os.readlink(path)}"
    return f"{mode} {hashlib.sha256(path.read_bytes()).hexdigest()[:16]}" if path.is_file() else mode
