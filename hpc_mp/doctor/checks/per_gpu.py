"""Judges of nvidia-smi's report on every GPU: one finding for each faulty GPU, one for all if none is faulty."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

from hpc_mp.base.text import counted
from hpc_mp.cluster.node.gpu_driver import SmiAnswer, ask_smi
from hpc_mp.cluster.node.nvidia_smi import GpuReport, SmiReport
from hpc_mp.cluster.node.source import Unavailable
from hpc_mp.doctor.checks.check import Check, Judgement, checks_of, words


class NotApplicable(Exception):
    """Raised if a GPU has no such part: the driver reports N/A."""


FindFault = Callable[[GpuReport], Judgement | None]
_LATER = ("remapped_rows", "mig_mode", "retired_pages")  # parts that older drivers for older GPUs do not report


def seen(answer: SmiAnswer) -> SmiReport:
    """Return nvidia-smi's answer. Raises Unavailable if it gave none."""
    if answer.smi is None:
        raise Unavailable(answer.words)
    return answer.smi


def each(find: FindFault, well: str) -> Callable[[SmiAnswer], Iterator[Judgement]]:
    """Return a judge that checks every GPU; ``well``: text of the finding if all GPUs with that part are ok. ``find`` returns the
    fault, None if the GPU is ok. It raises Unavailable, or NotApplicable if the GPU has no such part."""

    def judge(answer: SmiAnswer) -> Iterator[Judgement]:
        faults, well_ones, unseen = [], 0, []
        for gpu in seen(answer).gpus:
            try:
                ill = find(gpu)
            except NotApplicable:
                continue
            except Unavailable as why:
                unseen.append((gpu, str(why)))
                continue
            if ill is None:
                well_ones += 1
            else:
                faults.append(ill._replace(subject=str(gpu)))
        yield from faults
        if unseen:
            several = f"{len(unseen)} of {len(seen(answer).gpus)} GPUs: " if len(unseen) > 1 else ""
            yield Judgement("unknown", several + unseen[0][1], "" if several else str(unseen[0][0]))
        elif well_ones and not faults:
            yield Judgement("ok", f"{counted(well_ones, 'GPU')}: {well}")

    return judge


def checks_of_gpus(finds: Mapping[str, FindFault]) -> tuple[Check[Any], ...]:
    """Return the checks that apply a function to every GPU in nvidia-smi's answer."""
    return checks_of(ask_smi, {code: each(find, words()[code]["well"]) for code, find in finds.items()})


def number(gpu: GpuReport, *paths: str) -> float:
    """Return the number at the first of the paths that has one. Raises NotApplicable or Unavailable."""
    value = gpu.number(*paths)
    if value is None:
        raise _why(gpu, paths)
    return value


def says(gpu: GpuReport, *paths: str) -> str:
    """Return the text at the first of the paths that has one. Raises NotApplicable or Unavailable."""
    text = gpu.says(*paths)
    if text is None:
        raise _why(gpu, paths)
    return text


def usual_of(values: Sequence[str]) -> str | None:
    """Return the value of the majority, None if no value has one."""
    commonest = max(values, key=values.count, default="")
    return commonest if 2 * values.count(commonest) > len(values) else None


def driver_error(message: str) -> str:
    """Return the evidence for a GPU for which the driver reports an error instead of a value."""
    return f"the driver answers: {message}"


def _why(gpu: GpuReport, paths: Sequence[str]) -> Exception:
    if paths[0].partition("/")[0] in _LATER and not any(path.startswith(paths[0].partition("/")[0]) for path in gpu.values):
        return NotApplicable()
    failed = [message for path, message in gpu.failed().items() if path in paths]
    if failed:
        return Unavailable(driver_error(failed[0]))
    if any(path in gpu.values for path in paths):
        return NotApplicable()
    if any(path.startswith(f"{group}/") for path in paths for group in gpu.values):  # the whole group is a single "N/A"
        return NotApplicable()
    return Unavailable(f"nvidia-smi does not tell {paths[0]}")
