"""Reads what nccl-tests prints: written from its format strings (src/util.cu), with nothing of ours."""

import re
from dataclasses import dataclass

FLOAT = r"[-+]?(?:\d+\.?\d*(?:[eE][-+]?\d+)?|nan|inf)"
HALF = rf"\s+({FLOAT})\s+({FLOAT})\s+({FLOAT})\s+({FLOAT}|N/A)"
ROW = re.compile(rf"^\s*(\d+)\s+(\d+)\s+(\w+)\s+(\w+)\s+(-?\d+){HALF}{HALF}\s*$")
AVERAGE = re.compile(rf"^# Avg bus bandwidth\s*:\s*({FLOAT})")
BOUNDS = re.compile(r"^# Out of bounds values\s*:\s*(\d+) (OK|FAILED)")
DEVICE = re.compile(r"^#  Rank\s+(\d+) Group\s+(\d+) Pid\s+(\d+) on\s+(\S+) device\s+(\d+) \[([^\]]*)\] (.*)$")

# Copied from what nccl-tests 2.19.6 prints above the rows of all_reduce_perf.
HEADER = """\
#                                                              out-of-place                       in-place          
#       size         count      type   redop    root     time   algbw   busbw  #wrong     time   algbw   busbw  #wrong 
#        (B)    (elements)                               (us)  (GB/s)  (GB/s)             (us)  (GB/s)  (GB/s)         
"""  # noqa: W291


@dataclass(frozen=True)
class Half:
    """Of a row, out of place or in place; ``wrong`` None is N/A."""

    time_us: float
    algbw: float
    busbw: float
    wrong: float | None


@dataclass(frozen=True)
class Line:
    size: int
    count: int
    dtype: str
    redop: str
    root: int
    out_of_place: Half
    in_place: Half


@dataclass(frozen=True)
class Output:
    """``out_of_bounds`` None: no such line."""

    lines: list[Line]
    devices: list[tuple[int, int, int, str]]
    average: float
    out_of_bounds: int
    verdict: str


def parse(text: str) -> Output:
    """Raises AssertionError for anything that is neither a comment nor a row, or a missing line."""
    rows, devices = [], []
    average = bounds = None
    for line in text.splitlines():
        if found := DEVICE.match(line):
            devices.append((int(found[1]), int(found[2]), int(found[3]), found[4]))
        elif found := AVERAGE.match(line):
            average = float(found[1])
        elif found := BOUNDS.match(line):
            bounds = (int(found[1]), found[2])
        elif not line.startswith("#") and line.strip():
            found = ROW.match(line)
            assert found is not None, f"no row of nccl-tests: {line!r}"
            rows.append(Line(int(found[1]), int(found[2]), found[3], found[4], int(found[5]), _half(*found.groups()[5:9]),
                             _half(*found.groups()[9:13])))
    assert average is not None and bounds is not None, text
    return Output(rows, devices, average, *bounds)


def _half(time: str, algbw: str, busbw: str, wrong: str) -> Half:
    return Half(float(time), float(algbw), float(busbw), None if wrong == "N/A" else float(wrong))
