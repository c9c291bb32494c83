"""Ends of attempts and of ranks, recorded or as those that were, read from the TOML files beside this one."""

import re
import tomllib
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from watchdog_words import said as watchdog_said

from hpc_mp.diagnosis.evidence import Evidence, Hang
from hpc_mp.layout.placement import Degrees, place
from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.failures import RankFailure
from hpc_mp.rundir.standings import Standing, Wait

HOSTS = ("n1", "n2", "n3", "n4")
PLACES = {place_.rank: place_ for place_ in place(Degrees(tensor=2, pipeline=2, data=2), "DPT", 2).ranks}
JOB = Evidence(code=143, places=PLACES, hosts=HOSTS, supervisor_host="n1", run=RunDirectory(Path("/run")))
TEXTS = ("log", "srun", "logs", "kernel")  # keys with lines, or with lines by host
PART = re.compile(r"\{(?:(\d+) × )?([^{}]+)\}")

Ending = tuple[str, Evidence, str, tuple[str, ...], str]  # name, evidence, kind, nodes to blame, words of the message


def lines_of(text: str, parts: Mapping[str, str]) -> tuple[str, ...]:
    """The lines of a text; ``{NAME}`` stands for the part of that name, ``{9 × NAME}`` for nine of them, or of that line."""
    found: list[str] = []
    for line in text.removesuffix("\n").split("\n") if text else ():
        named = PART.fullmatch(line)
        found += int(named[1] or 1) * lines_of(parts.get(named[2], named[2]), parts) if named else (line,)
    return tuple(found)


def tables(file: str) -> dict[str, dict[str, Any]]:
    """The tables of a file, texts as lines; a table with ``like`` has all keys of that one which it does not have itself."""
    written = tomllib.loads(Path(__file__).with_name(file).read_text(encoding="utf-8"))
    parts, found = written.pop("parts", {}), dict[str, dict[str, Any]]()
    for name, table in written.items():
        found[name] = {**found.get(table.pop("like", ""), {}), **table}
        for key in TEXTS & table.keys():
            by_host = isinstance(table[key], dict)
            found[name][key] = ({host: lines_of(text, parts) for host, text in table[key].items()} if by_host
                                else lines_of(table[key], parts))
    return {"parts": {name: lines_of(text, parts) for name, text in parts.items()}, **found}


ATTEMPTS = tables("attempts.toml")
PROGRAM_ATTEMPTS = tables("program_attempts.toml")
PARTS = ATTEMPTS.pop("parts")
# What srun 22.05.8 writes after a task of its own accord has ended, recorded on four hosts; a traceback of rank 5.
ENDS_OTHERS, BOOM = PARTS["ENDS"], PARTS["BOOM"]
assert PROGRAM_ATTEMPTS.pop("parts").items() >= PARTS.items()


def said(rank: int, node: str, kind: str, message: str, time: float, nodes: tuple[str, ...] = (), standing: Standing | None = None
         ) -> RankFailure:
    return RankFailure(rank, node, kind, message, time, nodes=nodes, standing=standing)


def stands(rank: int, *awaited: int, passed: int = 7, number: int = 7) -> Standing:
    """In the n-th message of a group with others, having come to so many of them."""
    wait = Wait("all_reduce", awaited, "group 1", number) if awaited else None
    return Standing(rank, 50.0, 40.0, 0.0, 4, 0, "forward (stage.py:7)", wait, {"group 1": passed})


PEER = said(0, "n1", "peer", "RuntimeError: [gloo] Connection closed by peer [10.77.0.13]:4711", 50.0)


def evidence(table: Mapping[str, Any]) -> Evidence:
    """``end``: the line of srun after which it ends the others, of which rank 0 notices it; ``peer``: rank 0 notices anyway;
    ``failures``: rank, kind, message, time and blamed nodes; ``pids``: host, process and rank; ``hang``: seconds, rank, first."""
    known = {key: value for key, value in table.items() if key not in ("kind", "nodes", "words", "end", "peer", "failures")}
    srun, failures = known.pop("srun", ()), [said(row[0], HOSTS[row[0] // 2], *row[1:4], *map(tuple, row[4:]))
                                             for row in table.get("failures", ())]
    if "end" in table:
        srun = (*srun, *filter(None, [table["end"]]), *ENDS_OTHERS)
    peers = (PEER,) if "end" in table or "peer" in table else ()
    made: dict[str, Callable[[Any], Any]] = {
        "pids": lambda rows: {(host, pid): rank for host, pid, rank in rows}, "unended": tuple,
        "hang": lambda row: Hang(*row, *[None] * (2 - len(row))), "resident": lambda row: {int(rank): row[rank] for rank in row}}
    return replace(JOB, srun=srun, failures=(*peers, *failures),
                   **{key: made.get(key, lambda value: value)(value) for key, value in known.items()})


def endings(attempts: Mapping[str, Mapping[str, Any]]) -> list[Ending]:
    return [(name, evidence(table), table["kind"], tuple(table.get("nodes", ())), table["words"])
            for name, table in attempts.items()]


def of_all_but_5(lines: Callable[[int], Iterable[str]]) -> dict[str, list[str]]:
    """The logs of all nodes with the lines of every task except the fifth."""
    return {host: [f"{task}: {line}" for task in (2 * at, 2 * at + 1) if task != 5 for line in lines(task)]
            for at, host in enumerate(HOSTS)}


OVER_LIMIT = evidence(ATTEMPTS["over the limit"])
XID_79 = ATTEMPTS["Xid 79"]["kernel"]["n3"][0]
WATCHDOG = ATTEMPTS["watchdog"]["logs"]["n2"][0]
WAITED = "rank 5 on n3 made no progress: ranks 0-4, 6, 7"
PROGRAM = replace(JOB, program=True)

ENDINGS: list[Ending] = [
    *endings(ATTEMPTS),
    ("over the limit, one rank per node", replace(OVER_LIMIT, places={r: p for r, p in PLACES.items() if p.local_rank == 0}),
     "memory", (), "rank 4 (dp 1, pp 0, tp 0) on n3 ran out of memory"),
    ("a rank without a word for which others waited", replace(JOB, srun=ENDS_OTHERS, failures=(
        said(0, "n1", "hang", "Hung: no step", 50.0, standing=stands(0, 1, 2)),
        said(1, "n1", "hang", "Hung: no step", 49.0, standing=stands(1, 0, 2)))),
     "silent", (), "rank 2 (dp 0, pp 1, tp 0) on n2 gave no sign of life: it was stopped, is gone, or is stuck in native code; "
     "ranks 0, 1 waited for it"),
    ("a rank that stood elsewhere", replace(JOB, srun=ENDS_OTHERS, failures=(
        said(0, "n1", "hang", "Hung: no step", 50.0, standing=stands(0, 5)),), standings=(stands(5, passed=6),)), "hang", (),
     "rank 5 (dp 1, pp 0, tp 1) on n3 made no progress: it is in forward (stage.py:7) of step 4 and waits for no rank; rank 0 "
     "waited"),
    ("NCCL's watchdogs", replace(PROGRAM, logs=of_all_but_5(watchdog_said), srun=(
        "srun: error: n1: tasks 0-1: Aborted (core dumped)",)), "hang", (),
     f"{WAITED} waited for it 600 s in ALLREDUCE (12) (NCCL's watchdog)"),
    ("one for which all others have waited", replace(PROGRAM, srun=("srun: error: n1: task 0: Exited with exit code 1",),
                                                     logs=of_all_but_5(lambda _: (
        "Traceback (most recent call last):", '  File "/x/t.py", line 1, in f',
        "RuntimeError: Timed out waiting 6000ms for recv"))), "hang", (),
     f"{WAITED} gave up waiting for it: RuntimeError: Timed out waiting 6000ms")]
PROGRAM_ENDINGS: list[Ending] = [
    *endings(PROGRAM_ATTEMPTS),
    ("a watchdog before the stacks of all threads", replace(
        PROGRAM, srun=("srun: error: n1: task 0: Aborted",),
        logs=of_all_but_5(lambda task: (*watchdog_said(task), *300 * ("frame #1: clone",)))), "hang", (), f"{WAITED} waited"),
]
