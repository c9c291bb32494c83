"""The longest sample with which a rank's step fits into a memory, by dry runs of several lengths."""

from collections.abc import Callable
from dataclasses import dataclass

from hpc_mp.base.errors import HpcMpError
from hpc_mp.train.dry_run.dry_run import DryRun

CONTEXT = 1 << 30  # bytes of a CUDA context with its loaded kernels and workspaces of matrix products, about
HALVINGS = 3  # of the doubling between a length that fits and one that does not


@dataclass(frozen=True, slots=True)
class Fit:
    """The result of a search.

    Attributes:
        memory: bytes of the device.
        tokens: of the longest sample tried that fits; 0: none does. ``bytes``: that its step needs.
        more: of the shortest sample tried that does not fit; None: the job allows no longer one. ``more_bytes``: as ``bytes``.
        limit: why the job allows no longer one.
    """

    memory: int
    tokens: int
    bytes: int
    more: int | None
    more_bytes: int
    limit: str


def needed(result: DryRun) -> int:
    """Return the bytes of the device that a step needs: the peak, and on a GPU what libraries hold for themselves, about."""
    return result.step.peak.bytes + result.sockets.buffers + (CONTEXT if result.device == "cuda" else 0)


def longest(at: Callable[[int], DryRun], first: int, unit: int, memory: int) -> Fit:
    """Search for the longest sample that fits: double or halve the length, then bisect. ``at``: tokens of a sample -> the dry run
    of a rank. Raises HpcMpError if the job does not allow this length. ``first``: length to begin with. ``unit``: whose multiples
    are tried."""
    sizes: dict[int, int] = {0: 0}  # tokens -> bytes, of samples that fit
    beyond: dict[int, int] = {}  # and of those that do not
    limits: dict[int, str] = {}

    def fits(tokens: int) -> bool:
        try:
            size = needed(at(tokens))
        except HpcMpError as error:
            limits[tokens] = str(error)
            return False
        (sizes if size <= memory else beyond)[tokens] = size
        return size <= memory

    low = high = max(unit, first // unit * unit)
    if fits(low):
        while fits(high := 2 * low):
            low = high
    else:
        while low >= 2 * unit and not fits(low := low // 2 // unit * unit):
            high = low
    if low in sizes:
        for _ in range(HALVINGS):
            between = (low + high) // 2 // unit * unit
            if between <= low:
                break
            low, high = (between, high) if fits(between) else (low, between)
    best, more = max(sizes), min(beyond, default=None)
    limit = limits[min(limits)] if limits and (more is None or min(limits) < more) else ""
    return Fit(memory, best, sizes[best], more, beyond[more] if more is not None else 0, limit)
