"""Checks of the kernel log: of the last day, and for errors of NVIDIA GPUs and NVSwitches."""

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import TypeVar

from hpc_mp.base.findings import Severity
from hpc_mp.base.text import ago, counted
from hpc_mp.cluster.node.kernel_log import KernelMessage, read_kernel_log, read_log_with_gpus
from hpc_mp.cluster.node.xids import NEEDS, Action, SXidLine, XidLine, sxid, xid
from hpc_mp.doctor.checks.check import Judgement, checks_of, or_well, words

_DAY_S = 86_400.0


def _complaint(code: str) -> Callable[[tuple[KernelMessage, ...]], Iterator[Judgement]]:
    """Return a judge that searches the log of the last day for the lines of a check, those that are errors first."""
    graves: tuple[Severity, ...] = ("error", "warning")
    searches = [(grave, re.compile("|".join(words()[code][grave]))) for grave in graves if grave in words()[code]]

    def judge(lines: tuple[KernelMessage, ...]) -> Iterator[Judgement]:
        recent = [line for line in lines if line.age is None or line.age <= _DAY_S]
        for grave, pattern in searches:
            if matches := [line for line in recent if pattern.search(line.text)]:
                last = matches[-1]
                when = "" if last.age is None else f" {ago(last.age)}"
                count = counted(len(matches), "line")
                yield Judgement(grave, f"{count} in the last day, the last{when}: {last.text.strip()[:160]}")
                return
        yield Judgement("ok", "no such line in the last day")
    return judge


CHECKS = checks_of(read_kernel_log, {code: _complaint(code) for code in (
    "kernel-hardware", "kernel-lockup", "kernel-disk", "kernel-oom", "kernel-network")})


RECENT_S = 7200.0  # as azurehpc-health-checks; older errors were probably cured by a reset or a reboot
REMEDIES: dict[Action, str] = words()["gpu-xid"]["remedies"]
HARMLESS: dict[Action, str] = {"program": "are programs' doing", "none": "ask for nothing"}
_GOES_ON = re.compile(r"NVRM: (?:\(PCI ID: |fallen off the bus)")  # continuation of a message whose first line names the GPU
Entry = TypeVar("Entry", XidLine, SXidLine)


def xids(lines: Sequence[KernelMessage]) -> Iterator[Judgement]:
    entries = _by_part(_whole(lines), xid, lambda entry: (entry.bus, f"{entry.kind}{entry.echo}"))
    own = {(entry.bus, entry.number) for entry, *_ in entries.values() if not entry.echo}
    grave = False
    for entry, times, age in entries.values():
        if entry.action in HARMLESS or (entry.echo and (entry.bus, entry.number) in own):
            continue
        grave = True
        fresh = entry.action in NEEDS and age is not None and age <= RECENT_S
        severity: Severity = "error" if fresh else "unknown" if entry.action == "unknown" else "warning"
        yield Judgement(severity, f"{entry}; {_when(times, age)}", f"GPU {entry.bus}".strip(), REMEDIES[entry.action])
    if lines and not grave:
        also = ""
        for action, text in HARMLESS.items():
            numbers = sorted({entry.number or 0 for entry, *_ in entries.values() if entry.action == action})
            also += f"; Xid {', '.join(map(str, numbers))} {text}" if numbers else ""
        yield Judgement("ok", f"no Xid that blames a GPU in {counted(len(lines), 'line')} of the kernel's log{also}")


def _whole(lines: Sequence[KernelMessage]) -> list[KernelMessage]:
    """Return the messages with multi-line sentences joined."""
    messages: list[KernelMessage] = []
    for line in lines:
        if messages and _GOES_ON.search(line.text):
            messages[-1] = replace(messages[-1], text=f"{messages[-1].text} {line.text.strip()}")
        else:
            messages.append(line)
    return messages


def sxids(lines: Sequence[KernelMessage]) -> Iterator[Judgement]:
    entries = _by_part(lines, sxid, lambda entry: (f"{entry.switch} {entry.bus}", str(entry.number)))
    bad = (Judgement("error" if entry.fatal and age is not None and age <= RECENT_S else "warning",
                     f"SXid {number} ({'fatal' if entry.fatal else 'not fatal'}): {entry.words}; {_when(times, age)}", switch,
                     REMEDIES["reset"] if entry.fatal else "look at gpu-nvlink-errors; a link that goes on erring needs a reset")
           for (switch, number), (entry, times, age) in entries.items())
    yield from or_well(bad, "no error of an NVSwitch in the kernel's log" if lines else "")


def _by_part(lines: Sequence[KernelMessage], read: Callable[[str], Entry | None], key: Callable[[Entry], tuple[str, str]],
             ) -> dict[tuple[str, str], tuple[Entry, int, float | None]]:
    """Return, by part and kind, the latest entry, the number of occurrences, and the age of the latest."""
    entries: dict[tuple[str, str], tuple[Entry, int, float | None]] = {}
    for line in lines:
        if (entry := read(line.text)) is not None:
            entries[key(entry)] = (entry, entries.get(key(entry), (entry, 0, None))[1] + 1, line.age)
    return entries


def _when(times: int, age: float | None) -> str:
    when = "at a time that the log does not tell" if age is None else ago(age)
    return when if times == 1 else f"{times} times, last {when}"


XIDS = checks_of(read_log_with_gpus, {"gpu-xid": xids, "gpu-sxid": sxids})
