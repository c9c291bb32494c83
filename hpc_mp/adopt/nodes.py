"""Steps of one node each, in a loop over the nodes or one by one, which together are a program on all nodes of the job.

The module is separate because all later code sees such steps as one launch: an srun with one task per node, whose node number
is ``NODE_RANK``.
"""

from __future__ import annotations

import re
from collections.abc import Collection, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from hpc_mp.adopt.command import FLAGS, MEETING, OF_MACHINES, number_in
from hpc_mp.adopt.kinds import PRINTS
from hpc_mp.adopt.launches import LaunchCall, in_background
from hpc_mp.adopt.request import Request
from hpc_mp.adopt.setup import is_loop
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.statements import Source

_SIZES = frozenset({"nodes", "ntasks", "ntasks-per-node", "nodelist", "relative"})
_BESIDE = PRINTS | {"sleep", "let", "wait", "srun", "scontrol", "head", "tail", "sed", "awk", "seq", "cut", "tr", "(("}
_HEADS = tuple(map(re.compile, (  # of loops: the counter, its first value, its bound, and whether the bound is included
    r"for\s*\(\(\s*(?P<name>\w+)\s*=\s*(?P<first>\d+)\s*;\s*(?P=name)\s*(?:<(?P<more>=)?|!=)\s*(?P<last>[^;]+);",
    r"for\s+(?P<name>\w+)\s+in\s+[$`(\"]+seq\s+(?:-\w+\s+\S+\s+)?(?:(?P<first>\d+)\s+)?(?P<more>)(?P<last>[^\n;]+?)[)`\"]+\s*[\n;]",
    r"for\s+(?P<name>\w+)\s+in\s+\{(?P<first>\d+)\.\.(?P<more>)(?P<last>\d+)\}")))
_COUNTED = r"\(\(\s*(?:{0}\s*\+\+|\+\+\s*{0}|{0}\s*\+=\s*1)\s*\)\)|\b{0}=\$\(\(\s*\$?\{{?{0}\}}?\s*\+\s*1\s*\)\)|" \
    r"\blet\s+['\"]?(?:{0}\+\+|\+\+{0}|{0}\+=1)|\b{0}=\$\(expr\s+\$\{{?{0}\}}?\s*\+\s*1\)"


@dataclass(frozen=True, slots=True)
class Together:
    """A program that is started on all nodes by steps of one node each.

    Attributes:
        launch: the last step, as one step on all nodes.
        others: the other steps.
        differs: variables in its words that differ between nodes and that no rank variable provides.
    """

    launch: LaunchCall
    others: tuple[LaunchCall, ...]
    differs: tuple[str, ...]


def on_every_node(launch: LaunchCall, launches: Sequence[LaunchCall], source: Source, request: Request) -> Together | None:
    """Return the program that a launch starts together with others or as an iteration of a loop; None if it is a single step."""
    mine = [each for each in launches if _on_one_node(each) and in_background(each, source) and _alone(each, source)]
    if launch not in mine or (nodes := request.nodes or 1) < 2:
        return None
    last = mine[-1]
    loop = source.statements[last.statement].text if is_loop(last.call.inside) else ""
    name, first, rounds = _rounds(loop, request)
    before = [each for each in mine if each.statement != last.statement]
    if (not loop and len(mine) != nodes) or (rounds is not None and rounds + len(before) != nodes):
        return None
    words = set(re.findall(r"(?<!\\)\$\{?(\w+)", _written(last)))
    counters = {each: int(found[1]) for each in words if re.search(_COUNTED.format(re.escape(each)), loop) and (
        found := re.search(rf"(?m)(?:^|[;&\s]){each}=[\"']?(\d+)\b", source.text))}
    ours = {each for each, begin in ({name: first} | counters).items() if each and begin == len(before)}
    if any(_own(each, str(number)) != _own(last, str(number), ours) for number, each in enumerate(before)):
        return None
    changing = set(re.findall(r"\w+", last.value("nodelist") or "")) | {name, *counters}
    tasks = number_in(last.value("ntasks"), request) or 1
    sizes = [Option(option, str(value), last.call.line, True) for option, value in (("nodes", nodes), ("ntasks", nodes * tasks))]
    arguments = tuple(replace(each, source=_renamed(each.source, ours, "\\$NODE_RANK" if shell.source == "-c" else "$NODE_RANK"))
                      for shell, each in pairwise((last.call.arguments[0], *last.call.arguments)))
    return Together(replace(last, call=replace(last.call, arguments=arguments), together=True,
                            options=(*(each for each in last.options if each.name not in _SIZES), *sizes)),
                    tuple(each for each in mine if each is not last), tuple(sorted(changing & words - ours)) if loop else ())


def _on_one_node(launch: LaunchCall) -> bool:
    """Return True if it is a step on one node that it names."""
    place = launch.value("nodelist") or launch.value("relative") or ""
    one = launch.value("nodes") in (None, "1")
    return launch.srun and launch.tier > 1 and bool(place) and one and not re.search(r"[,%/*]|^[^$]*\[", place)


def _alone(launch: LaunchCall, source: Source) -> bool:
    """Return True if only a loop that counts and prints surrounds a step."""
    return not {"if_statement", "case_statement", "subshell", "function_definition"} & set(launch.call.inside) and all(
        call.command.name in _BESIDE for call in source.statements[launch.statement].calls)


def _written(launch: LaunchCall) -> str:
    return " ".join(each.source for each in launch.call.arguments[launch.words[launch.program][1]:])


def _own(launch: LaunchCall, number: str, counters: Collection[str] = ()) -> list[str]:
    """Return its words on the node with the given number, without rendezvous options."""
    words: list[str] = []
    at = 0
    while at < len(launch.texts):
        name, equals, _ = launch.texts[at].lstrip("-").replace("_", "-").partition("=")
        if name in MEETING | OF_MACHINES and launch.texts[at].startswith("-"):
            at += not equals and name not in FLAGS
        else:
            words.append(_renamed(launch.texts[at], counters, number))
        at += 1
    return words


def _rounds(loop: str, request: Request) -> tuple[str, int | None, int | None]:
    """Return the variable of a loop, its first number, and the number of iterations, as far as the text shows."""
    for pattern in _HEADS:
        if (found := pattern.match(loop)) is not None:
            first = int(found["first"] or 1)
            last = number_in(found["last"].strip().strip("\"'"), request)
            return found["name"], first, None if last is None else last - first + (found["more"] is not None)
    over = re.match(r"for\s+(\w+)\s+in\b", loop)
    return (over[1] if over else ""), None, None


def _renamed(text: str, counters: Collection[str], by: str) -> str:
    for name in counters:
        text = re.sub(rf"(?<!\\)\$(?:{name}\b|\{{{name}\}})", lambda _: by, text)
    return text
