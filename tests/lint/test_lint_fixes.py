"""The linter's advice, applied to the planted faults by a machine that reads nothing but the advice: the finding is gone."""

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from lint_cases import CASES, HEAD

from hpc_mp.lint.sbatch import Finding, lint

FILLED = {"HH:MM:SS": "01:00:00", "=N": "=8", "=FILE": "=hosts", "…/etc": "/usr/share/conda/etc"}

Edit = Callable[[list[str], int, re.Match[str]], None]  # changes the lines, of which the one at an index has the fault


def above(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(at, advice[1])


def below(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(at + 1, advice[1])


def around(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines[at:at + 1] = [advice[1], lines[at], advice[2]]


def directive(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(1, advice[1])


def dropped(lines: list[str], at: int, advice: re.Match[str]) -> None:
    del lines[at]


def moved(lines: list[str], at: int, advice: re.Match[str]) -> None:
    lines.insert(1, lines.pop(at))


def changed(pattern: str, to: str) -> Edit:
    """In the line of the fault: what matches becomes ``to``, in which ``{}`` is what the advice says."""
    def edit(lines: list[str], at: int, advice: re.Match[str]) -> None:
        said = advice[1] if advice.groups() else ""
        lines[at] = re.sub(pattern, lambda found: found.expand(to).replace("{}", said), lines[at], count=1)

    return edit


def value(lines: list[str], at: int, advice: re.Match[str]) -> None:
    changed(r"=(\$\(\(.*\)\)|\$\(.*\)|\S+)", "={}")(lines, at, advice)


def rewritten(lines: list[str], old: str, new: str) -> None:
    lines[:] = [line.replace(old, new) for line in lines]


def plain(lines: list[str]) -> None:
    rewritten(lines, "–", "-")
    rewritten(lines, " = ", "=")


# Pattern of the advice → the edit that follows it. The first match counts.
EDITS: dict[str, Edit] = {
    r"Write (\d+G) for gigabytes": changed(r"(--mem\S*)=\d+", r"\1={}"),
    r"Write (\d+:00:00) for hours": changed(r"=\d+", "={}"),
    r"Write (--ntasks-per-node=1) instead of --ntasks": changed(r"--ntasks=\d+", "{}"),
    r"^export OMP_NUM_THREADS=(\S+)$": value,
    r"^srun --ntasks-per-node=1 bash -c '(accelerate)": changed(
        r"^.*--machine_rank \S+ (.*)$", r"srun -K bash -c '{} launch \1'"),
    r"Write (--nodes=\d+), or name fewer": changed(r"--nodes=\S+", "{}"),
    r"Remove it from one of them": lambda lines, at, advice: rewritten(lines, "--exclude=n[2-4]", "--exclude=n[3-4]"),
    r"Join them with && instead of ;": lambda lines, at, advice: lines.__setitem__(
        slice(None), re.sub(r"(a\.py);?\s+(?=python|torchrun)", r"\1 && ", "\n".join(lines)).split("\n")),
    r"Request one node": lambda lines, at, advice: rewritten(lines, "--nodes=2", "--nodes=1"),
    r"Use the number from Slurm: (\S+)\.": changed(r"--nnodes=\d+", "--nnodes={}"),
    r"Start (\d+) processes": changed(r"(nproc-per-node)=\d+", r"\1={}"),
    r"Write --ntasks-per-node=(\d+)\.": lambda lines, at, advice: rewritten(
        lines, "--ntasks-per-node=8", f"--ntasks-per-node={advice[1]}"),
    r"Leave the number out to use": changed(r"-np? \d+ ", ""),
    r"Leave --ntasks out of srun": changed(r"-n \d+ ", ""),
    r"Add (#SBATCH \S+?)\.?( |$)": directive,
    r"Make #!/bin/bash the first line": dropped,
    r"dos2unix": changed("\r", ""),
    r"Remove it\. The file": changed("\0", " "),
    r"Move it above": moved,
    r"Start the line with #SBATCH": changed(r"^\s+", ""),
    r"Write #SBATCH, or": changed(r"#\s*\w+", "#SBATCH"),
    r"Write #SBATCH (--requeue)\.": lambda lines, at, advice: rewritten(lines, "--no-requeue", advice[1]),
    r"Did you mean (NCCL_\w+)": changed(r"NCCL_\w+", "{}"),
    r"Did you mean (--[\w-]+)": changed(r"--[\w-]+", "{}"),
    r"Pass (--[\w-]+) to srun": dropped,
    r"Write minutes, MM:SS, (\S+),": changed(r"time=\S+", "time={}"),
    r"Write (--gres=\S+)\.": changed(r"--gres=\S+", "{}"),
    r"Write N or": changed(r"-N=", "-N"),
    r"Use BEGIN, END, (FAIL)": changed(r"ABORT|timeout", "{}"),
    r"Remove the blanks": changed(r"\s+$", ""),
    r"Write singleton": changed(r"=\S+", "=singleton"),
    r"with ASCII dashes and without blanks around": lambda lines, at, advice: plain(lines),
    r"Write (--[\w-]+)=VALUE": changed(r"-[\w-]+", "{}"),
    r"Close it": changed(r"$", '"'),
    r"use a pattern such as (%j)": changed(r"\$USER|~/", ""),
    r"Write (\d\d:\d\d:\d\d) for": changed(r"\d\d:\d\d", "{}"),
    r"Use another value": changed(r"=\w+", ""),
    r"add (--gpu-bind=none)": changed(r"--gpus-per-task=\d", r"\g<0> {}"),
    r"(Keep|Remove) one of them": changed(r" *--(hint|mem-per-cpu)=\S+", ""),
    r"or write (--gpu-bind=none)": changed(r"--gpu-bind=\S+", "{}"),
    r"Add (%A_%a)": changed(r"\.log", "-{}.log"),
    r"Write (--export=ALL,)…": changed(r"--export=", "{}"),
    r"Write (--switches=\S+)\.": changed(r"--switches=\S+", "{}"),
    r"^srun --export=ALL …, or (unset SLURM_EXPORT_ENV)": above,
    r"^srun --het-group=0": changed(r"srun", "srun --het-group=0,1"),
    r"^(srun --ntasks-per-node=1) torchrun …, or": changed(r"^srun", "{}"),
    r"^(srun --ntasks-per-node=1) torchrun …$": changed(r"^torchrun", "{} -K torchrun"),
    r"^(srun --\S+) …": changed(r"srun", "{}"),
    r"^Write (srun) python …": changed(r"^python", "{} -K python"),
    r"and wait for it: (COMMAND) & wait": changed(r"$", " &\nwait $!"),
    r"Add (wait) at the end": below,
    r"(srun --mpi=pmix) PROGRAM": changed(r"\S*(mpirun|mpiexec(\.hydra)?) -np \d+ ", ""),
    r"add (--overlap) to the inner": changed(r"'srun", "'srun {}"),
    r"^(env .*) sbatch …": changed(r"^sbatch", "{} sbatch"),
    r"^(?:Add )?(set [-+]\w+)( at the start| before it and set -u after it|,)": above,
    r"^(set -o pipefail)": above,
    r"^Add (.+) before it, and (.+) after it\.": around,
    r"^Add (trap '' TERM|module purge|source \S+) before it": above,
    r"^Add (export \S+), with one line": above,
    r"^Add (scontrol release \S+) after it": below,
    r"^(apptainer exec --nv)": changed(r"apptainer exec", "{}"),
    r"Leave B: out": changed(r"B:", ""),
    r"or write --signal=(B:)": changed(r"^trap.*", ""),
    r"^bash -c .*exec python …'$": changed(r"\bpython", "exec python"),
    r"^export MASTER_PORT=(\S.*)$": value,
    r"(\$\(\(10000.*\)\))": value,
    r"^(--rdzv-backend=.*)$": changed(r"torchrun", "torchrun {}"),
    r"MASTER_ADDR=(\$\(scontrol .*\))$": value,
    r"Stop instead: (\S.*)$": changed(r"=.*", "={}"),
    r"^ulimit -s (8192)": changed(r"unlimited", "{}"),
    r"NAME=(\$\(< ~/.secret\))": value,
    r"Use (SLURM_SUBMIT_DIR)": changed(r'"\$\(.*\)"', '"${}"'),
    r"Leave the & out": changed(r" &", ""),
    r"^[Ww]rite (TORCH_NCCL_\w+|NCCL_\w+=\w+)": changed(r"\w*NCCL_\w+=\w+", "{}"),
    r"^Write (NCCL_\w+)": changed(r"NCCL_\w+", "{}"),
    r"word for it: LOC, NVL, (PIX)": changed(r"=\d", "={}"),
    r"^(export) \w+=…": changed(r"^", "{} "),
    r"(?i)leave it out(, and select| but for)": changed(r"CUDA_\w+=\S+ ", ""),
    r"Leave it out of srun": changed(r"--(nodes|gres)=\S+ ", ""),
    r"Leave it out\. If the order matters": changed(r"--node-rank=\S+", ""),
    r"(?i)leave (it|them|--\w+) out|leave it out|remove it|(keep|remove) one|keep --|or leave both|as a directive|Keep only":
        dropped,
    r"torch.distributed.init_process_group": dropped,
    r"Create it before sbatch": lambda lines, at, advice: None,  # the folder, not the script
}


def followed(text: str, finding: Finding) -> str | None:
    """The text with the advice applied, or None when it needs a person."""
    fix = finding.fix
    for short, long in FILLED.items():
        fix = fix.replace(short, long)
    lines, at = text.split("\n"), finding.line - 1
    for pattern, edit in EDITS.items():
        if advice := re.search(pattern, fix):
            if edit is dropped and at and not lines[at].startswith(("#SBATCH", "export ", "ulimit ")):
                continue  # that line does more than what is to be left out
            edit(lines, at, advice)
            return "\n".join(lines)
    return None


def applied(case: dict[str, Any], directory: Path) -> bool | None:
    """Whether following the advice removes the finding; None when no machine can follow it."""
    bad = case["bad"].lstrip("\n") if case["bad"].startswith("\n\n") else case["bad"]
    text = bad if "#!" in bad[:4] or "\r" in bad else HEAD + bad
    version = tuple(map(int, case["version"].split("."))) if "version" in case else None
    [finding, *_] = [each for each in lint(text, directory=directory, version=version)  # type: ignore[arg-type]
                     if each.code == case["code"]]
    mended = followed(text, finding)
    if mended is None:
        return None
    if found := re.search(r"mkdir -p ([^\s.]+)", finding.fix):
        (directory / found[1]).mkdir(parents=True)
    after = lint(mended, directory=directory, version=version)  # type: ignore[arg-type]
    return not any(each.code == case["code"] for each in after)


NEEDS_A_PERSON = {"HM108", "HM116", "HM119", "HM120", "HM215", "HM312", "HM331", "HM353", "HM355", "HM360", "HM402",
                  "HM405", "HM411", "HM412", "HM415", "HM611"}


@pytest.mark.parametrize("case", CASES, ids=[f"{case['code']}-{at}" for at, case in enumerate(CASES)])
def test_the_advice_removes_the_finding(case: dict[str, Any], tmp_path: Path) -> None:
    removed = applied(case, tmp_path)
    assert removed is not False
    assert removed or case["code"] in NEEDS_A_PERSON, (
        f"{case['code']}: no row of EDITS follows its remedy: add one, or it to NEEDS_A_PERSON and its twin to planted.toml")
