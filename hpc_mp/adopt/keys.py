"""The keys of the job file for the resources that the job asks for, and the text of the job file."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import tomli_w

from hpc_mp.adopt.account import Fate, LineFate
from hpc_mp.adopt.command import ProgramStart
from hpc_mp.adopt.request import Request, not_understood
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.script import Script

ENV_TABLES = ("environment.set", "program.environment")
TABLES = ("job", "program", "sweep", "slurm", "environment")


def machine_keys(script: Script, request: Request, start: ProgramStart,
                 step_cpus: int | None = None) -> tuple[dict[str, Any], list[LineFate]]:
    """Return the keys for GPUs, CPUs, memory and whole nodes that the script asks for, and the fates of its lines about sizes.

    Args:
        step_cpus: the CPUs per task that srun is given.
    """
    keys: dict[str, Any] = {}
    ranks, gpus = start.ranks_per_node, request.gpus
    said: dict[str, tuple[Fate, str, str]] = {}
    shape = f"{start.nodes} × {ranks} ranks"
    for name, number in (("nodes", start.nodes), ("ntasks-per-node", ranks), ("ntasks", start.nodes * ranks)):
        key = "job.nodes" if name == "nodes" else "job.ranks_per_node"
        same = script.value(name) == str(number)
        more = f", {number} in place of {request.ntasks}: as many on each node" if (
            name == "ntasks" and start.start != "node" and request.ntasks and ranks == -(-request.ntasks // start.nodes)) else ""
        said[name] = (Fate.KEPT, key, "") if same else (Fate.REPLACED, "job.nodes, job.ranks_per_node",
                                                        f"the program has {shape}{more}"
                                                        + (", one task per node in the step of its "
                                                           "own" if start.start == "node" else ""))
    if gpus is None or gpus.count is None:
        keys["slurm.gpu_request"] = "none"
    elif gpus.count == ranks and not gpus.others:
        keys["slurm.gpu_request"] = gpus.form
        if gpus.type:
            keys["slurm.gpu_type"] = gpus.type
    else:
        keys["slurm.gpu_request"] = "none"
        form = "gres" if gpus.form == "gres" else "gpus-per-node"
        kind = f"{gpus.type}:" if gpus.type else ""
        keys[f"slurm.extra.{form}"] = gpus.others or (f"gpu:{kind}{gpus.count}" if form == "gres" else f"{kind}{gpus.count}")
    of_gpus = "slurm.gpu_request" if keys["slurm.gpu_request"] != "none" else "slurm.extra"
    for name in ("gres", "gpus-per-node", "gpus", "gpus-per-task"):
        if gpus is None or gpus.count is None:
            said[name] = (Fate.DROPPED, "", "it asks for no GPU")
            continue
        said[name] = (Fate.KEPT, of_gpus, f"{gpus.count} per node") if name in ("gres", "gpus-per-node") else (
            Fate.REPLACED, of_gpus, f"{gpus.count} on each node, seen by all ranks of it")
    if gpus is None and (gres := script.option("gres")) is not None and gres.value and not_understood(gres) is None:
        keys["slurm.extra.gres"] = gres.value
        said["gres"] = (Fate.KEPT, "slurm.extra.gres", "")
    said["ntasks-per-gpu"] = said["tres-per-task"] = (Fate.REPLACED, "job.ranks_per_node", f"the program has {shape}")
    whole = "slurm.extra.exclusive" in request.keys and request.keys["slurm.extra.exclusive"] is None
    per_gpu = "slurm.extra.cpus-per-gpu" in request.keys  # sbatch refuses --cpus-per-task together with it
    if request.cpus is None and request.tasks_per_node > ranks and not (whole or per_gpu):  # one CPU per task, as Slurm does
        keys["slurm.extra.cpus-per-task"] = each = -(-request.tasks_per_node // ranks)
        for name in ("ntasks", "ntasks-per-node"):
            fate, key, why = said[name]
            said[name] = (fate, f"{key}, slurm.extra.cpus-per-task", f"{why}, with the CPUs of {request.tasks_per_node} tasks")
    if request.cpus is None and step_cpus and not per_gpu:
        keys["slurm.extra.cpus-per-task"] = step_cpus if start.start == "rank" else max(1, step_cpus // ranks)
    if request.cpus:
        each = max(1, request.cpus * request.tasks_per_node // ranks)
        keys["slurm.extra.cpus-per-task"] = each
        said["cpus-per-task"] = (Fate.KEPT, "slurm.extra.cpus-per-task", "") if each == request.cpus else (
            Fate.REPLACED, "slurm.extra.cpus-per-task", f"{each} for each of {ranks} ranks, as many on a node as before")
    else:
        said["cpus-per-task"] = (Fate.DROPPED, "", "it names no number of CPUs")
    for name in ("exclusive", "mem"):
        instead = ("oversubscribe",) if name == "exclusive" else ("mem-per-cpu", "mem-per-gpu")
        if not any(f"slurm.extra.{each}" in request.keys for each in (name, *instead)):
            keys[f"slurm.extra.{name}"] = False  # else the job would ask for whole nodes and all their memory
    return keys, [_line(script, option, *said[option.name]) for option in script.options if option.name in said
                  and not_understood(option) is None and script.option(option.name) is option]


def _line(script: Script, option: Option, fate: Fate, where: str, why: str) -> LineFate:
    if option.name == "nodes" and "-" in (option.value or ""):
        fate, why = Fate.REPLACED, "a job has exactly so many nodes: the least of the range"
    return LineFate(option.line, option.line, script.lines[option.line - 1].strip(), fate, where, why)


def job_tree(keys: Mapping[str, Any], job_directory: Path) -> dict[str, Any]:
    """Convert dotted keys to tables, in the order in which a person writes them. Keys with the value None are left out."""
    tree: dict[str, Any] = {}
    for key, value in keys.items():
        if value is None:
            continue
        parts = key.split(".", 2 if key.startswith(("slurm.extra.", "environment.set.", "program.environment.")) else 1)
        table = tree
        for part in parts[:-1]:
            table = table.setdefault(part, {})
        table[parts[-1]] = list(value) if isinstance(value, tuple) else value
    program = tree["program"]
    place = os.path.relpath(program["directory"], job_directory)
    program["directory"] = place if not place.startswith("../..") else program["directory"]
    if program["directory"] == ".":
        del program["directory"]
    if program.get("start") == "rank":
        del program["start"]
    program["command"] = program.pop("command")
    return {name: tree[name] for name in TABLES if tree.get(name)}


def job_text(tree: Mapping[str, Any], name: str, lost: tuple[LineFate, ...], notes: tuple[str, ...]) -> str:
    """Return the text of the job file, headed by comments on lines that were not carried over and by notes."""
    comments = [f"# Adopted from {name} by hpc-mp adopt, which says what became of each line."]
    comments += [f"# Not carried over, line {each.place}: {_comment(each.text)}: {_comment(each.why)}" for each in lost]
    comments += [f"# Note: {_comment(each)}" for each in notes]
    return "\n".join(comments) + "\n\n" + tomli_w.dumps(tree, multiline_strings=True)


def _comment(text: str) -> str:
    return "".join(letter if letter.isprintable() else " " for letter in text)
