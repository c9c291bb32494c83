"""``hpc-mp cluster nodes``: the ledger of bad nodes, which new jobs exclude: its entries, their reasons, and its changes."""

from __future__ import annotations

import json
import time
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

import click

from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.text import did_you_mean
from hpc_mp.cluster.bad_nodes import AVOIDED_S, BadNode, bad_nodes, findings, ledger, record, take_back
from hpc_mp.cluster.slurm.nodelist import compress, expand
from hpc_mp.cluster.slurm.nodes import node_states
from hpc_mp.cluster.slurm.records import find_settings

BY_HAND = "by hand"  # code and finder of a fault that a user reports
EVER_H = 24 * 365


@click.command(help="List the nodes that new jobs exclude, with the source and the reason, and suspected nodes, which are not "
                    "excluded. Or remove nodes from the list, or add them. Waiting runs remove their own exclusions if they need "
                    "the nodes.")
@click.option("--take-back", "back", metavar="LIST", multiple=True, help="Remove nodes from the list: n3, n[1-4].")
@click.option("--add", "added", metavar="LIST", multiple=True, help="Add nodes; new jobs exclude them if enough others exist.")
@click.option("--because", metavar="TEXT", help="With --add: the reason, in a sentence.")
@click.option("--suspected", is_flag=True, help="With --add: only record a suspicion; jobs still get the nodes.")
@click.option("--hours", type=click.IntRange(1, EVER_H), metavar="N", help="With --add: hours of the exclusion.  [default: 24]")
@click.option("--cluster", "cluster", metavar="NAME", help="Name of the cluster.  [default: the cluster of this machine]")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def nodes(back: tuple[str, ...], added: tuple[str, ...], because: str | None, suspected: bool, hours: int | None,
          cluster: str | None, as_json: bool) -> None:
    name = cluster or _here()
    path = ledger(name)
    taken, additions = _names(back), _names(added)
    if (because is not None or suspected or hours is not None) and not additions:
        word = "--because" if because is not None else "--suspected" if suspected else "--hours"
        raise HpcMpError(word, "has an effect only with --add", "name the node: --add n3")
    if additions and not (because or "").strip():
        raise HpcMpError(f"--add {' '.join(added)}", "needs the reason, for later readers of the list",
                         '--because "its fan is broken"')
    if both := sorted({*taken} & {*additions}):
        raise HpcMpError(f"--take-back and --add {compress(both)}", "contradict each other", "remove one of them")
    held = {finding.node for finding in findings(path)}
    strangers = [node for node in taken if node not in held]
    if len(strangers) == len(taken):
        _check(taken, [*held], f"is not in the ledger of cluster {name}", "see `hpc-mp cluster nodes`")
    if additions and cluster is None:
        _check(additions, _known(), f"is not a node of cluster {name}", "see `sinfo -N`")
    try:
        out = take_back(path, taken)
        now = time.time()
        record(path, [BadNode(node, BY_HAND, " ".join((because or "").split()), BY_HAND, now,
                              now + (hours * 3600.0 if hours else AVOIDED_S), "suspected" if suspected else "certain")
                      for node in additions])
    except OSError as error:
        raise HpcMpError(str(path), f"cannot be written ({error.strerror})", "correct its permissions, or free space") from None
    if as_json:
        click.echo(json.dumps({
            "cluster": name, "ledger": str(path), "taken_back": sorted({finding.node for finding in out}),
            "not_in_ledger": strangers,
            "nodes": [asdict(finding) | {"avoided": finding.certainty != "suspected"} for finding in findings(path)]}))
        return
    if out:
        click.echo(f"removed: {compress(dict.fromkeys(finding.node for finding in out))}")
    if strangers:
        click.echo(f"not in the ledger: {compress(strangers)}")
    _show(name, path)


def _show(name: str, path: Path) -> None:
    entries = findings(path)
    if not entries:
        click.echo(f"cluster {name}: no bad or suspected nodes")
        return
    rows = [("node", "certainty", "since", "until", "fault"),
            *((finding.node, finding.certainty, _clock(finding.time), _clock(finding.until),
               f"{finding.code}: {finding.evidence}" + (f" ({finding.run})" if finding.run != finding.code else ""))
              for finding in entries)]
    widths = [max(len(row[column]) for row in rows) for column in range(4)]
    for *cells, fault in rows:  # one line per node even if it is long: a terminal wraps it, and grep finds all of it
        click.echo("  ".join([*(cell.ljust(width) for cell, width in zip(cells, widths, strict=True)), fault]))
    avoided = bad_nodes(path)
    if avoided:
        click.echo(f"\nnew jobs exclude {compress(sorted(avoided))} if enough other nodes exist; "
                   f"`hpc-mp cluster nodes --take-back {min(avoided)}` removes one")
    else:
        click.echo("\nno node is excluded: these are suspicions")


def _clock(seconds: float) -> str:
    return time.strftime("%m-%d %H:%M", time.localtime(seconds))


def _names(lists: Sequence[str]) -> tuple[str, ...]:
    return tuple(dict.fromkeys(node for nodelist in lists for node in expand(nodelist)))


def _check(named: Sequence[str], candidates: Sequence[str], rule: str, remedy: str) -> None:
    """Raise HpcMpError for the first unknown node."""
    for node in named:
        if node not in candidates:
            raise HpcMpError(f"node {node}", rule, did_you_mean(node, candidates, remedy))


def _here() -> str:
    """Return the cluster's name. Raises HpcMpError if no Slurm reports it."""
    name = find_settings().get("ClusterName")
    if not name:
        raise HpcMpError("hpc-mp cluster nodes", "needs the name of the cluster, but no Slurm answers here",
                         "run it on a machine of the cluster, or pass --cluster NAME")
    return name


def _known() -> list[str]:
    try:
        return list(node_states())
    except CommandFailed as error:
        raise HpcMpError("this machine's cluster", str(error).splitlines()[-1],
                         "run it on a machine of the cluster, or pass --cluster NAME") from None
