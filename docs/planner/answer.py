"""The planner behind docs/planner: what its form offers, and the answer of ``hpc-mp plan`` to it. A web worker calls it."""

import json
import shlex
from contextlib import chdir, redirect_stdout, suppress
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import click

from hpc_mp.base.errors import HpcMpError
from hpc_mp.catalogue import catalogue
from hpc_mp.cli.plan import command
from hpc_mp.layout.models.types import verdicts
from hpc_mp.planner.machine import machine_named

OPTIONS = ("machine", "nodes", "sequence", "global-batch", "precision", "goal")


def choices() -> str:
    """JSON of the machines, as name and title, and of the types that need no transformers."""
    machines = []
    for name, row in catalogue().machines.items():
        with suppress(HpcMpError):  # one of those whose memory, peak or links are unknown
            machine_named(name)
            machines.append((name, row.cloud, f"{row.name}: {row.gpus} × {row.gpu_title}"))
    return json.dumps({"machines": machines, "types": [verdict.model_type for verdict in verdicts() if verdict.table]})


def answer(form: str) -> str:
    """JSON of the page, of the plan, and of value, rule and remedy if it is refused. A job that does not fit has both page and refusal."""
    asked = json.loads(form)
    words = ["--model", "config.json", "--html", "plan.html", "--json"]
    for name in OPTIONS:
        words += [f"--{name}", str(asked[name])] if asked.get(name) else []
    for key in shlex.split(asked.get("keys") or "", comments=True):
        words += ["--set", key]
    printed, error = StringIO(), None
    with TemporaryDirectory() as folder, chdir(folder):
        Path("config.json").write_text(asked["config"], encoding="utf-8")
        try:
            with redirect_stdout(printed):
                command.main(words, standalone_mode=False)
        except HpcMpError as refusal:
            error = refusal.value, refusal.rule, refusal.remedy
        except click.ClickException as refusal:
            error = "the form", refusal.format_message(), "change this field"
        page = Path("plan.html").read_text(encoding="utf-8") if Path("plan.html").is_file() else ""
    return json.dumps({"page": page, "plan": None if error else json.loads(printed.getvalue()), "error": error})
