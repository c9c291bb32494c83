"""``hpc-mp env``: the effective environment variables, their sources, and their problems."""

import json
import os
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

import click
from rich.markup import escape
from rich.table import Table

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.findings import findings_document
from hpc_mp.base.views import view as texts
from hpc_mp.cli.output import exit_by, print_findings, terminal
from hpc_mp.cluster.node.source import NodeSource
from hpc_mp.environment.findings import place
from hpc_mp.environment.precedence import Effective
from hpc_mp.environment.profiles import profile_names
from hpc_mp.environment.versions import shown
from hpc_mp.environment.view import AUTO, View, one_line, shell_lines, view_of

IN_A_PIPE = 400  # columns: a program that reads the table expects each variable on one line


@click.command(help="Show the effective environment variables for NCCL and the network, their sources, the additions of this "
                    "platform's profile, and problems. The first source with a value wins: the process, ~/.nccl.conf (or "
                    "$NCCL_CONF_FILE), /etc/nccl.conf, the profile, NCCL's default.")
@click.option("--profile", default=AUTO, show_default=True, metavar="NAME",
              help="A name from env/profiles, none, or auto: the profile of this machine's platform.")
@click.option("--all", "everything", is_flag=True, help="Also show unset variables with NCCL's defaults.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document, with the defaults.")
@click.option("--shell", "as_shell", is_flag=True, help='Print export and unset lines, for eval "$(hpc-mp env --shell)".')
@click.option("--root", metavar="DIR", type=click.Path(path_type=Path, exists=True, file_okay=False),
              help="Examine a copy of another machine's files below DIR, with this process's variables.")
def command(profile: str, everything: bool, as_json: bool, as_shell: bool, root: Path | None) -> None:
    view = view_of(NodeSource(), os.environ, profile) if root is None else \
        view_of(NodeSource(root.resolve(), _refuse), os.environ, profile, installed=lambda name: None)
    if as_json:
        click.echo(json.dumps(_tree(view)))
    elif as_shell:
        click.echo(os.fsencode("\n".join(shell_lines(view))))
    else:
        _print(view, everything)
    if not as_shell:
        exit_by(view.findings)


def _refuse(argv: Sequence[str]) -> str:
    raise CommandFailed(f"{argv[0]} is not run for a copy of a machine")


def _tree(view: View) -> dict[str, Any]:
    applied = view.applied
    return {
        "platform": asdict(view.platform),
        "profile": applied and {
            **applied.profile.model_dump(exclude={"detect", "variable"}),
            "variables": [variable.model_dump() for variable in applied.profile.variable],
            "left_out": [{"name": omission.variable.name, "value": omission.variable.value, "why": omission.why}
                         for omission in applied.left_out],
            "unmet": applied.unmet,
        },
        "profiles": profile_names(),
        "versions": {library: shown(version) for library, version in view.versions.items()},
        "files": [{"path": file.path, "missing": file.missing} for file in view.files],
        "variables": [asdict(variable) for variable in view.variables],
        **findings_document(view.findings),
    }


def _print(view: View, everything: bool) -> None:
    console = terminal()
    if not console.is_terminal:
        console.width = IN_A_PIPE
    words = texts("cli/env.txt.j2", markup=escape, shown=shown)
    console.print(words.head(view))
    console.print(_table([variable for variable in view.variables if everything or variable.origin != "default"]))
    if not everything:
        more = sum(variable.origin == "default" for variable in view.variables)
        console.print(f"{more} others have NCCL's own defaults (--all)")
    if view.applied:
        console.print(words.profile(view.applied), end="")
    print_findings(view.findings)


def _table(variables: Sequence[Effective]) -> Table:
    table = Table(box=None, padding=(0, 2, 0, 0))
    table.add_column("variable", no_wrap=True)
    for column in ("value", "source", "overrides"):
        table.add_column(column, overflow="fold")
    for variable in variables:
        value = "(NCCL decides)" if variable.value is None else one_line(variable.value) or "(empty)"
        hidden = "; ".join(f"{setting.value or '(empty)'} ({setting.where or setting.origin})" for setting in variable.hides)
        table.add_row(*map(escape, (one_line(variable.name), value, one_line(place(variable)), one_line(hidden))))
    return table
