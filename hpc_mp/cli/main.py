"""The ``hpc-mp`` command: verbs are imported only when they are called, and errors become exit codes."""

import importlib
import json
import os
import sys
from itertools import takewhile
from typing import Any

import click
from click.shell_completion import CompletionItem

from hpc_mp import __version__
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.extras import missing_extra
from hpc_mp.base.plugins import plugin
from hpc_mp.base.text import escaped, nearest
from hpc_mp.cli.output import lasting_output

# Group, then verb: (module in hpc_mp.cli, one line of help). The help is here because `hpc-mp --help` imports no verb. No module:
# the verb is an entry point of another distribution.
GROUPS: dict[str, dict[str, tuple[str, str]]] = {
    "Run": {
        "init": ("init", "Detect the hardware and write a job file that runs here."),
        "data": ("data", "Tokenize a job's text before it runs."),
        "launch": ("launch", "Plan, place, render and start a job."),
        "run": ("run", "Start any distributed program: hpc-mp run -- python train.py …"),
        "adopt": ("adopt", "Convert a job script to a job file, and account for its lines."),
        "status": ("status", "Show the state of a run, and the reason if it waits or failed."),
        "logs": ("logs", "Show the output of a run, with the cause of a failure at the end."),
        "cancel": ("cancel", "End a run, after its ranks have saved."),
        "report": ("report", "Draw a run: curves, ranks, pipeline, memory; or compare several."),
        "export": ("export", "Write a run's checkpoint as a Hugging Face model directory."),
        "prune": ("prune", "List and remove old checkpoints, caches and runs."),
        "train": ("train", "The command of each rank (under srun, mpirun, torchrun or the emulator)."),
    },
    "Trust": {
        "doctor": ("doctor", "Find problems of this machine, or the bad nodes and links of a cluster."),
        "bench": ("bench", "Measure the bandwidth of a collective, and compare it with the fabric's."),
        "env": ("env", "Show the effective environment variables, their sources and problems."),
        "lint": ("lint", "Find problems of a file: job script, job file, variables, slurm.conf, template."),
        "cluster": ("cluster", "Describe a Slurm cluster; read, write and check its switches."),
    },
    "Get a cluster": {
        "cloud": ("cloud", "Write the files of a Slurm cluster for Azure CycleCloud; check a template."),
        "lab": ("", "Run a Slurm cluster of several hosts on this machine, for tests."),
    },
    "Understand": {
        "verify": ("verify", "Compare a job's model and layout, shrunk, with Hugging Face's own model."),
        "plan": ("plan", "Show whether a training fits, how fast it is, and its best layout."),
        "model": ("model", "Show what a model is: sizes, how it is cut, which degrees are possible."),
        "placement": ("placement", "Show the place and the coordinates of each rank, and the cost."),
        "schedule": ("schedule", "Show the action table of a pipeline schedule."),
    },
}
VERBS = {verb: row for verbs in GROUPS.values() for verb, row in verbs.items()}
RENAMED = {"cyclecloud": "cloud"}
"""Verbs of release 0.0 that still work but are hidden in the help."""


# Verbs of other launchers, and the equivalent here.
ELSEWHERE = {
    **dict.fromkeys(("resume", "continue", "restart", "requeue"), "launch JOB.toml --resume"),
    **dict.fromkeys(("submit", "start", "sbatch", "execute"), "launch JOB.toml"),
    **dict.fromkeys(("dry-run", "dryrun", "validate", "check", "explain"), "launch JOB.toml --dry-run"),
    **dict.fromkeys(("stop", "kill", "scancel", "abort"), "cancel RUN"),
    **dict.fromkeys(("ps", "list", "queue", "squeue"), "status"),
    **dict.fromkeys(("tail", "log"), "logs RUN --follow"), **dict.fromkeys(("convert", "save"), "export RUN --output DIRECTORY"),
}


class Verbs(click.Group):
    """A click group that imports a verb's module on use."""

    def list_commands(self, ctx: click.Context) -> list[str]:
        return list(VERBS)

    def get_command(self, ctx: click.Context, cmd_name: str) -> click.Command | None:
        verb = RENAMED.get(cmd_name, cmd_name)
        if verb not in VERBS:
            return None
        if verb != cmd_name:
            click.echo(f"hpc-mp {cmd_name} is now hpc-mp {verb}", err=True)
        module = VERBS[verb][0]
        command = importlib.import_module(f"hpc_mp.cli.{module}").command if module else plugin("commands", verb)
        assert isinstance(command, click.Command)
        return command

    def shell_complete(self, ctx: click.Context, incomplete: str) -> list[CompletionItem]:
        """Return the verbs without importing them, and the options of ``hpc-mp`` itself."""
        verbs = [CompletionItem(verb, help=text) for verb, (_, text) in VERBS.items() if verb.startswith(incomplete)]
        return verbs + click.Command.shell_complete(self, ctx, incomplete)

    def resolve_command(self, ctx: click.Context, args: list[str]) -> tuple[str | None, click.Command | None, list[str]]:
        """Resolve a command like click, but suggest the nearest verb for an unknown one."""
        if args and not args[0].startswith("-") and args[0] not in {*VERBS, *RENAMED}:
            near = [f"hpc-mp {ELSEWHERE[args[0].lower()]}"] if args[0].lower() in ELSEWHERE else nearest(args[0], VERBS)
            guess = f"Did you mean '{near[0]}'?" if near else "'hpc-mp --help' lists them."
            ctx.fail(f"No such command '{args[0]}'. {guess}")
        return super().resolve_command(ctx, args)

    def format_commands(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        for group, verbs in GROUPS.items():
            with formatter.section(group):
                formatter.write_dl([(f"{verb:<{max(map(len, VERBS))}}", text) for verb, (_, text) in verbs.items()])


@click.command(cls=Verbs, context_settings={"help_option_names": ["-h", "--help"], "max_content_width": 110})
@click.version_option(__version__, prog_name="hpc-mp")
def cli() -> None:
    """Train Hugging Face models too big for one GPU: look, plan, place, launch, train, compare."""


def main() -> None:
    """Run the command line: exit 0 (done), 1 (the run or a check failed), 2 (the input is wrong)."""
    with lasting_output() as out:
        code, why = _run()
        sys.stdout.flush()
        own = takewhile(lambda word: word != "--", sys.argv[1:])  # the words behind it belong to another command
        if why is not None and not out.written and "--json" in own:
            click.echo(json.dumps(why))
            sys.stdout.flush()
        if out.incomplete is not None:
            click.echo(f"hpc-mp: standard output is incomplete ({out.incomplete})", err=True)
            code = code or 1
    sys.exit(code)


def _run() -> tuple[int, dict[str, Any] | None]:
    """Run the verb and print its output. Return its exit code, and the reason of an early end for ``--json``."""
    try:
        code = cli(prog_name="hpc-mp", standalone_mode=False)
    except click.exceptions.Exit as stop:
        code = stop.exit_code
    except click.ClickException as error:
        error.show()
        return 2, {"state": "refused", "error": {"message": error.format_message()}}
    except click.Abort:
        click.echo("interrupted", err=True)
        return 1, {"state": "interrupted", "error": {"message": "interrupted"}}
    except (ModuleNotFoundError, HpcMpError, RunFailed) as error:
        cause = missing_extra(error) if isinstance(error, ModuleNotFoundError) else error
        if cause is None or os.environ.get("HPC_MP_DEBUG") == "1":
            raise
        message = str(cause)
        click.echo(f"hpc-mp: {escaped(message)}", err=True)
        if isinstance(cause, RunFailed):
            return 1, {"state": "failed", "error": {"message": message}}
        parts = {"value": cause.value, "rule": cause.rule, "remedy": cause.remedy} if isinstance(cause, HpcMpError) else {}
        return 2, {"state": "refused", "error": {"message": message, **parts}}
    return code if isinstance(code, int) else 0, None
