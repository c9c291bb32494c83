"""Start of the ranks of a measurement, as the ranks of a job are started, and their events.

On emulated nodes they are forked by the launcher's emulator; on Slurm they are the tasks of one ``srun``.
Nothing is written to a shared place: the specification is an argument, results come on standard output. ``follow`` makes rows of
the events.
"""

import json
import os
import secrets
import selectors
import socket
import subprocess
import sys
import tempfile
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

from hpc_mp.base.command import Runner, ask
from hpc_mp.base.errors import HpcMpError, RunFailed
from hpc_mp.base.exit_codes import ending
from hpc_mp.base.line_file import NewLines
from hpc_mp.cluster.slurm.nodes import address_of
from hpc_mp.cluster.slurm.steps import is_queue_notice, srun
from hpc_mp.diagnosis.texts import kind_of
from hpc_mp.doctor.bench.result import BenchRow, row
from hpc_mp.doctor.bench.spec import THROUGH_LAUNCHER, BenchSpec, Event, dump_spec, events
from hpc_mp.launch.emulator.emulator import EmulatedRank, Emulator
from hpc_mp.launch.emulator.slurm_env import EMULATED, in_blocks, inherited, srun_environments

PROGRAM = "hpc_mp.doctor.bench.ranks.program"
ENTRY = f"{PROGRAM}:forked"
POLL_S = 0.1  # seconds between two polls of forked ranks' output
KEPT = 12  # last lines of the ranks' output, shown if they fail
PATIENCE_S = 10.0  # for srun to end its ranks after an interrupt


def on_emulated_nodes(spec: BenchSpec, environ: Mapping[str, str], entry: str = ENTRY) -> Iterator[Event]:
    """Fork all ranks on this machine and yield their events. Raises RunFailed if a rank fails. ``entry``: function that a rank
    calls, ``"module:function"``."""
    shared = {"OMP_NUM_THREADS": "1", **inherited(environ), **EMULATED}
    with ExitStack() as stack:
        folder = Path(stack.enter_context(tempfile.TemporaryDirectory(prefix="hpc-mp-bench-")))
        (folder / "spec.json").write_text(dump_spec(spec), encoding="utf-8")
        emulator = stack.enter_context(Emulator(("hpc_mp.doctor.bench.ranks.torch_network", entry.partition(":")[0]), shared))
        lock = stack.enter_context(open(folder / "lock", "w"))
        listener = stack.enter_context(socket.create_server(("127.0.0.1", 0), backlog=max(128, spec.world)))
        step = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(listener.getsockname()[1])}
        environs = srun_environments(in_blocks(spec.nodes, spec.ranks_per_node), str(os.getpid()), step)
        ranks = [EmulatedRank(folder / f"rank-{rank}.log", variables) for rank, variables in enumerate(environs)]
        emulator.start(ranks, folder / "spec.json", listener, lock.fileno(), entry)
        yield from _follow_emulator(emulator, [rank.log for rank in ranks])


def _follow_emulator(emulator: Emulator, logs: Sequence[Path]) -> Iterator[Event]:
    readers = [NewLines(log) for log in logs]
    while emulator.running:
        emulator.receive(POLL_S)
        for reader in readers:
            yield from _unless_refused(events(reader.read()))
    if emulator.broken is not None:
        raise RunFailed(emulator.broken)
    # The order in which ranks end is random: the first whose last lines do not report a failed peer is the cause.
    failed = [(end, _last_words(logs[end.rank])) for end in emulator.exits if end.code and not end.ours]
    failed.sort(key=lambda failure: kind_of("\n".join(failure[1])) == "peer")
    if failed:
        end, last_lines = failed[0]
        raise RunFailed("\n".join([f"rank {end.rank} {ending(end.code)}", *last_lines]))


def _last_words(log: Path) -> list[str]:
    return log.read_text(errors="replace").splitlines()[-KEPT:] if log.exists() else []


def on_slurm(spec: BenchSpec, options: Sequence[str], environ: Mapping[str, str], ask: Runner = ask) -> Iterator[Event]:
    """Start one srun and yield its events: a step of the current allocation or a separate job, by ``environ`` and ``options``.
    Rank 0 reports its node and port, which are then sent to all ranks on srun's standard input. Raises RunFailed."""
    shape = [f"--nodes={spec.nodes}", f"--ntasks={spec.world}", f"--ntasks-per-node={spec.ranks_per_node}"]
    command = srun([*shape, "--distribution=block:block", "--kill-on-bad-exit=1", "--export=ALL", *options],
                   [sys.executable, "-P", "-m", PROGRAM, dump_spec(spec)])
    token = secrets.token_hex(8)

    def answer(event: Event) -> str:
        return json.dumps({"address": address_of(event["node"], ask), "port": event["port"], "token": token})

    return _follow(command, {"OMP_NUM_THREADS": "1", **environ, THROUGH_LAUNCHER: "1"}, answer)


def _follow(command: Sequence[str], environ: Mapping[str, str], answer: Callable[[Event], str]) -> Iterator[Event]:
    """Yield the ranks' events; ``answer`` makes the line for all ranks from rank 0's event ``meet``."""
    try:
        process = subprocess.Popen(command, env=environ, stdin=subprocess.PIPE, stdout=subprocess.PIPE, stderr=subprocess.PIPE,
                                   text=True, errors="replace", start_new_session=True)
    except OSError as error:
        raise RunFailed(f"{command[0]} cannot be started ({error.strerror})") from None
    last: deque[str] = deque(maxlen=KEPT)
    try:
        for source, line in _lines(process):
            line_events = list(_unless_refused(events([line])))
            for event in line_events:
                if event["event"] == "meet":
                    assert process.stdin is not None
                    process.stdin.write(answer(event) + "\n")
                    process.stdin.flush()
                else:
                    yield event
            if not line_events and line.strip():
                last.append(line)
                if source == "error" and is_queue_notice(line):
                    yield {"event": "note", "text": line}
        code = process.wait()
    finally:
        _end(process)
    if code:
        raise RunFailed("\n".join([f"{command[0]} {ending(code)}", *last]))


def _lines(process: subprocess.Popen[str]) -> Iterator[tuple[str, str]]:
    """Yield ("output" or "error", line) as they come, until both streams are closed."""
    assert process.stdout is not None and process.stderr is not None
    remainder = {"output": b"", "error": b""}
    with selectors.DefaultSelector() as selector:
        selector.register(process.stdout, selectors.EVENT_READ, "output")
        selector.register(process.stderr, selectors.EVENT_READ, "error")
        while selector.get_map():
            for key, _ in selector.select():
                data = os.read(key.fd, 1 << 16)
                *lines, remainder[key.data] = (remainder[key.data] + data).split(b"\n")
                if not data:
                    selector.unregister(key.fileobj)
                    lines = [remainder[key.data]]
                yield from ((key.data, line.decode(errors="replace")) for line in lines)


def _unless_refused(stream: Iterator[Event]) -> Iterator[Event]:
    for event in stream:
        if event["event"] == "refused":
            raise HpcMpError(event["value"], event["rule"], event["remedy"])
        yield event


def _end(process: subprocess.Popen[str]) -> None:
    if process.poll() is None:
        process.terminate()
        try:
            process.wait(PATIENCE_S)
        except subprocess.TimeoutExpired:
            process.kill()
            process.wait()
    for pipe in (process.stdin, process.stdout, process.stderr):
        if pipe is not None:
            pipe.close()


@dataclass(frozen=True, slots=True)
class Measured:
    """The whole measurement: ``ranks`` and ``versions`` as reported by the ranks, and a row for each size."""

    ranks: tuple[dict[str, Any], ...]
    versions: dict[str, str]
    rows: tuple[BenchRow, ...]


class Watcher(Protocol):
    """An observer of the progress: all ranks have met, a size begins, its result, a message of Slurm."""

    def met(self, ranks: list[dict[str, Any]], versions: dict[str, str]) -> None: ...
    def begins(self, size: int) -> None: ...
    def row(self, row: BenchRow) -> None: ...
    def note(self, text: str) -> None: ...


def follow(spec: BenchSpec, events: Iterable[Event], watcher: Watcher) -> Measured:
    """Collect the results. Raises RunFailed if ranks fail or end early, HpcMpError if a rank refuses the input."""
    ranks: list[dict[str, Any]] = []
    versions: dict[str, str] = {}
    rows: list[BenchRow] = []
    ended = False
    for event in events:
        match event["event"]:
            case "ranks":
                ranks.extend(sorted(event["ranks"], key=lambda rank: rank["rank"]))
                versions.update(event["versions"])
                _check_hosts(spec, ranks)
                watcher.met(ranks, versions)
            case "size":
                watcher.begins(event["size"])
            case "row":
                rows.append(row(spec, event["size"], event["ranks"]))
                watcher.row(rows[-1])
            case "note":
                watcher.note(event["text"])
            case "end":
                ended = True
    if not ended:
        raise RunFailed("the ranks ended before all sizes were measured")
    return Measured(tuple(ranks), versions, tuple(rows))


def _check_hosts(spec: BenchSpec, ranks: list[dict[str, Any]]) -> None:
    """Check that ranks fill host after host, as groups by node and rail require."""
    hosts = [rank["host"] for rank in ranks]
    for node in range(spec.nodes):
        node_hosts = set(hosts[node * spec.ranks_per_node:(node + 1) * spec.ranks_per_node])
        if len(node_hosts) > 1:
            raise RunFailed(f"ranks {node * spec.ranks_per_node} to {(node + 1) * spec.ranks_per_node - 1} should share a node "
                            f"and run on {', '.join(sorted(node_hosts))}: --ranks-per-node is not what the launcher did")
