"""``hpc-mp cluster topology``: read switches from many sources, write them for Slurm, check them against measured rates."""

import json
import sys
import time
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import click
from rich.markup import escape

from hpc_mp import __version__
from hpc_mp.base.command import CommandFailed
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.text import counted
from hpc_mp.cli.output import terminal
from hpc_mp.cluster.bandwidth import LinkRates, noted
from hpc_mp.cluster.slurm.nodelist import expand
from hpc_mp.cluster.slurm.records import SHOW_CONFIG, SHOW_TOPOLOGY, show_config, show_topology
from hpc_mp.cluster.topology import Switch, Topology
from hpc_mp.cluster.topology.check import Agreement, agreement
from hpc_mp.cluster.topology.inferred import infer, read_measured_topology
from hpc_mp.cluster.topology.model import TopologyReading, chosen, listed, only
from hpc_mp.cluster.topology.readers import SOURCES, rates, read
from hpc_mp.cluster.topology.slurm_text import to_conf, to_yaml

WRITTEN = {
    "tree": ("topology.conf", "slurm.conf: TopologyPlugin=topology/tree"),
    "block": ("topology.conf", "slurm.conf: TopologyPlugin=topology/block (Slurm 24.05 or later)"),
    "yaml": ("topology.yaml", "Slurm 25.05 or later, which ignores topology.conf if this file exists."),
}


@click.command(help="""Show the switches of a cluster, write them for Slurm, or check them.

\b
FILE: source of the switches; - for standard input. Without it Slurm is queried.
hpc-mp cluster topology                                       Slurm's own topology
hpc-mp cluster topology fabric.txt --to tree                  topology.conf from the output of ibnetdiscover
hpc-mp cluster topology --from measured                       leaves, from the doctor's measured rates
hpc-mp cluster topology --check                               comparison of Slurm with these rates; exit 1 if they differ
""")
@click.argument("file", required=False, type=click.Path(path_type=Path, allow_dash=True))
@click.option("--from", "kind", type=click.Choice(list(SOURCES)), help="Format of FILE.  [default: detected]")
@click.option("--to", "target", type=click.Choice(list(WRITTEN)),
              help="Write topology.conf of the tree or of the blocks, or topology.yaml, to standard output.")
@click.option("--nodes", "nodelist", metavar="LIST", help="Only these nodes: n[1-64].")
@click.option("--check", is_flag=True, help="Compare with the rates that hpc-mp doctor measured between the nodes.")
@click.option("--measured", "measured", metavar="FILE", type=click.Path(path_type=Path),
              help="With --check: a cluster.json; default: the doctor's record of this cluster.")
@click.option("--json", "as_json", is_flag=True, help="Print one JSON document.")
def topology(file: Path | None, kind: str | None, target: str | None, nodelist: str | None, check: bool, measured: Path | None,
             as_json: bool) -> None:
    _refuse_useless(target, check, measured, as_json)
    reading = _known(file, kind, check)
    if nodelist is not None:
        reading = _only(reading, nodelist)
    if check:
        _check(reading, rates(_text(measured), str(measured)) if measured is not None else _noted(), as_json)
    elif target is not None:
        _write(reading, target)
    elif as_json:
        click.echo(json.dumps(_document(reading)))
    else:
        _show(reading)
    if not reading.topologies and not check:
        raise RunFailed(f"{reading.origin}: {'; '.join(reading.notes) or 'no switches'}")


def _refuse_useless(target: str | None, check: bool, measured: Path | None, as_json: bool) -> None:
    for wrong, option, remedy in (
        (measured is not None and not check, "--measured", "add --check, or pass the file as FILE"),
        (target is not None and check, "--to", "leave out --check, or --to"),
        (target is not None and as_json, "--json", "leave out --json, or --to"),
    ):
        if wrong:
            raise HpcMpError(option, "has no effect here", remedy)


def _known(file: Path | None, kind: str | None, check: bool) -> TopologyReading:
    if file is not None:
        return read(_text(file), "standard input" if str(file) == "-" else str(file), kind)
    if kind == "measured" and not check:
        survey = _noted()
        return read_measured_topology(survey, f"rates measured by hpc-mp doctor on {_day(survey)}")
    if kind not in (None, "slurm"):
        raise HpcMpError(f"--from {kind}", "needs a file", "pass FILE, or - for standard input")
    try:
        answer = show_topology()
    except CommandFailed as error:
        raise HpcMpError(" ".join(SHOW_TOPOLOGY), str(error).splitlines()[-1], "pass a FILE") from None
    return read(answer, " ".join(SHOW_TOPOLOGY), "slurm")


def _text(file: Path) -> str:
    try:
        return (sys.stdin.buffer.read() if str(file) == "-" else file.read_bytes()).decode("utf-8-sig")
    except OSError as error:
        raise HpcMpError(str(file), f"cannot be read ({error.strerror})", "pass another file") from None
    except UnicodeDecodeError:
        raise HpcMpError(str(file), "is not UTF-8 text", "pass another file") from None


def _noted() -> LinkRates:
    """Return the rates of this machine's cluster. Raises HpcMpError."""
    try:
        name = show_config().config.get("ClusterName") or None
    except CommandFailed as error:
        raise HpcMpError(" ".join(SHOW_CONFIG), str(error).splitlines()[-1], "pass a cluster.json") from None
    survey = noted(name)
    if survey is None:
        raise HpcMpError(f"cluster {name}", "has not been measured",
                         "run `hpc-mp doctor cluster --nodes N` first, or pass a cluster.json")
    return survey


def _day(measured: LinkRates) -> str:
    return time.strftime("%Y-%m-%d", time.localtime(measured.time))


def _only(reading: TopologyReading, nodelist: str) -> TopologyReading:
    hosts = expand(nodelist)
    topologies = tuple(only(topo, frozenset(hosts)) for topo in reading.topologies)
    attached = {host for topo in topologies for host in topo.hosts}
    missing = [host for host in hosts if host not in attached]
    notes = (f"{listed(missing)}: not under a switch",) if missing else ()
    return replace(reading, topologies=topologies, notes=reading.notes + notes)


# --- write -----------------------------------------------------------------------------------------------------------


def _write(reading: TopologyReading, target: str) -> None:
    if not reading.topologies:
        return
    if target == "yaml":
        topologies = reading.topologies
        default = any(topo.default for topo in topologies)
        topologies = tuple(replace(topo, default=topo.default or (not default and number == 0))
                           for number, topo in enumerate(topologies))
        click.echo(to_yaml(topologies, _header(reading, target, topologies)), nl=False)
    else:
        candidates = [topo for topo in reading.topologies if topo.kind == target]
        if not candidates:
            kinds = " and ".join(dict.fromkeys(topo.kind for topo in reading.topologies))
            raise HpcMpError(f"--to {target}", f"{reading.origin} has no {target} but {kinds}",
                             "a topology is written as what it is: choose another --to, or another source")
        selected = chosen(candidates)
        others = [topo.name for topo in reading.topologies if topo.name != selected.name]
        small = [block.name for block in selected.switches if selected.sizes and len(block.hosts) < selected.sizes[0]]
        notes = [f"the topology is {selected.name}; left out: {', '.join(others)}"] if others else []
        notes += [f"{listed(small)}: fewer nodes than the first of BlockSizes: needs Slurm 25.05 or later"] if small else []
        reading = replace(reading, notes=(*reading.notes, *notes))
        click.echo(to_conf(selected, _header(reading, target, (selected,))), nl=False)
    for note in reading.notes:
        click.echo(f"note: {note}", err=True)


def _header(reading: TopologyReading, target: str, topologies: Sequence[Topology]) -> tuple[str, ...]:
    name, use = WRITTEN[target]
    nodes = len({host for topo in topologies for host in topo.hosts})
    return (f"{name}: {counted(nodes, 'node')}, written by hpc-mp {__version__} from {reading.origin}", *reading.notes, use)


# --- show ------------------------------------------------------------------------------------------------------------


def _document(reading: TopologyReading) -> dict[str, Any]:
    return {
        "origin": reading.origin,
        "notes": list(reading.notes),
        "topologies": [{
            "name": topo.name, "kind": topo.kind, "default": topo.default, "block_sizes": list(topo.sizes),
            "switches": [{"name": switch.name, "switches": list(switch.children), "nodes": list(switch.hosts)}
                         for switch in topo.switches],
        } for topo in reading.topologies],
    }


def _show(reading: TopologyReading) -> None:
    console = terminal()
    for topo in reading.topologies:
        sizes = f", sizes {','.join(map(str, topo.sizes))}" if topo.sizes else ""
        console.print(f"[bold]{escape(topo.name)}[/]: {topo.kind}{sizes}, {counted(len(topo.hosts), 'node')}")
        by_name = {switch.name: switch for switch in topo.switches}
        for line in _branches(topo.tops if topo.kind == "tree" else by_name, by_name):
            console.print(escape(line))
    for note in reading.notes:
        console.print(f"[dim]{escape(note)}[/]")
    console.print(f"[dim]from {escape(reading.origin)}[/]")


def _branches(names: Iterable[str], by_name: Mapping[str, Switch], before: str = "") -> Iterator[str]:
    switches = [by_name[name] for name in names if name in by_name]
    for switch in switches:
        last = switch is switches[-1]
        hosts = f"  {len(switch.hosts)}: {listed(switch.hosts)}" if switch.hosts else ""
        yield f"{before}{'└' if last else '├'}─ {switch.name}{hosts}"
        yield from _branches(switch.children, by_name, before + ("   " if last else "│  "))


# --- check -----------------------------------------------------------------------------------------------------------


def _check(reading: TopologyReading, measured: LinkRates, as_json: bool) -> None:
    tree = chosen(reading.topologies).tree
    comparison = agreement(tree, measured)
    if as_json:
        click.echo(json.dumps(_verdict(reading, measured, comparison)))
    else:
        console = terminal()
        colour = {"agrees": "green", "disagrees": "red", "cannot tell": "yellow"}[comparison.verdict]
        console.print(f"[{colour}]{comparison.verdict}[/]: {escape(reading.origin)} and the rates of {_day(measured)}")
        console.print(escape(comparison.why))
        for odd in comparison.odd:
            console.print(f"[red]{escape(str(odd))}[/]")
        if comparison.unplaced and comparison.verdict != "cannot tell":
            console.print(escape(f"{listed(comparison.unplaced)}: the rates do not show their leaf"))
        if comparison.odd:
            console.print("→ find the cause (moved cables, a slow node), correct topology.conf, and run `scontrol reconfigure`"
                          + ("; `hpc-mp cluster topology --from measured --to tree` writes the measured topology"
                             if infer(measured).groups else ""))
    if comparison.verdict == "disagrees":
        raise click.exceptions.Exit(1)


def _verdict(reading: TopologyReading, measured: LinkRates, comparison: Agreement) -> dict[str, Any]:
    return {
        "verdict": comparison.verdict, "why": comparison.why, "origin": reading.origin, "measured": measured.time,
        "odd": [{"nodes": list(odd.nodes), "believed": odd.believed or None, "measured_with": odd.measured,
                 "home": odd.home or None} for odd in comparison.odd],
        "unplaced": list(comparison.unplaced),
    }
