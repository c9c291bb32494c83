"""A script that consists of one srun launch, as ``[program]``: its ranks have hpc-mp's own numbers and places."""

from __future__ import annotations

import re
from typing import Any

from hpc_mp.adopt.request import Request
from hpc_mp.cluster.slurm.option_syntax import parse, syntax
from hpc_mp.launch.program.launchers import launcher
from hpc_mp.lint.sbatch.shell import SHELLS
from hpc_mp.lint.sbatch.statements import Source

EXPANDED = re.compile(r"[$`*?\[\]{}~<>|&;()!#\\\n]")  # characters that bash interprets
LOGIN_SHELL = re.compile(r"#!.*\s(-\w*l|--login\b)")  # it reads the user's profile, from which programs have their variables
WITHOUT_EFFECT = frozenset({"kill-on-bad-exit", "label", "unbuffered", "nodes", "ntasks", "ntasks-per-node"})
OF_THE_JOB = frozenset({"account", "comment", "constraint", "cpus-per-task", "error", "exclusive", "gpus-per-node", "gres",
                        "job-name", "mail-type", "mail-user", "mem", "nodes", "ntasks", "ntasks-per-node", "open-mode", "output",
                        "partition", "qos", "requeue", "reservation", "time"})


def literal_keys(source: Source, request: Request) -> dict[str, Any] | None:
    """Return the keys of ``[program]`` and its sizes; None for any other script."""
    statement = source.statements[0] if len(source.statements) == 1 else None
    if statement is None or statement.kind != "command" or statement.background or EXPANDED.search(statement.text) \
            or LOGIN_SHELL.match(source.text):
        return None
    call = statement.commands[0]
    if call.words[0].text != "srun" or call.prefixes or call.assignments or not request.options <= OF_THE_JOB:
        return None
    options, program = parse(call.words[1:], syntax("srun"), permute=False)
    command = [word.text for word in program]
    nodes, tasks = request.nodes, request.tasks_per_node
    sizes = {"nodes": nodes, "ntasks": (nodes or 0) * tasks, "ntasks-per-node": tasks}
    if not command or nodes is None or request.ntasks not in (None, nodes * tasks) or launcher(command) is not None \
            or command[0].rpartition("/")[2] in SHELLS:
        return None
    if any(option.name not in WITHOUT_EFFECT or (option.name in sizes and option.value != str(sizes[option.name]))
           for option in options):
        return None
    gpus = request.gpus
    if gpus is not None and (gpus.count != tasks or gpus.others or gpus.form == "auto"):
        return None
    keys: dict[str, Any] = {"job.nodes": nodes, "job.ranks_per_node": tasks, "program.command": tuple(command),
                            "slurm.gpu_request": gpus.form if gpus else "none"}
    if gpus is not None and gpus.type:
        keys["slurm.gpu_type"] = gpus.type
    keys["slurm.extra.cpus-per-task"] = request.cpus or False  # else each rank would get its share of a node
    for name, others in (("exclusive", ("oversubscribe",)), ("mem", ("mem-per-cpu", "mem-per-gpu"))):
        if not any(f"slurm.extra.{other}" in request.keys for other in (name, *others)):
            keys[f"slurm.extra.{name}"] = False  # else the job would request whole nodes and all their memory
    return keys
