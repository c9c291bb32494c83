"""The planner behind docs/planner: what its form offers, and the answer of ``hpc-mp plan`` to it. A web worker calls it."""

import gc
import json
import shlex
import threading
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

if not hasattr(threading, "get_native_id"):  # in Pyodide, which has one thread
    threading.get_native_id = threading.get_ident
gc.freeze()  # the modules, which no collection frees: a sixth of an answer's time
OPTIONS = ("machine", "nodes", "sequence", "global-batch", "precision", "goal")


def choices() -> str:
    """JSON of the machines that can be planned for, as name, group and title, and of the types that need no transformers."""
    known, machines = catalogue(), []
    rows = [*((gpu.name, "gpu", gpu.title or gpu.name) for gpu in known.gpus.values()),
            *((name, row.cloud, f"{row.name}: {row.gpus} × {row.gpu_title}") for name, row in known.machines.items())]
    for row in rows:
        with suppress(HpcMpError):  # one of those whose memory, peak or links are unknown
            machine_named(row[0])
            machines.append(row)
    return json.dumps({"machines": machines, "types": [verdict.model_type for verdict in verdicts() if verdict.table]})


def answer(form: str) -> str:
    """JSON of the page, of the plan, and of value, rule and remedy if it is refused. A job that does not fit
    has both page and refusal."""
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
