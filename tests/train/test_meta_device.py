"""A step with the branches for GPUs mixes no tensors of host and device, and makes the host wait for nothing."""

import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import layouts
import pytest
from layouts import JOB, layout
from tables import table

CASES: dict[str, list[Any]] = table(__file__, "meta_device.toml", "cases")
WAITS: dict[str, list[Any]] = table(__file__, "meta_device.toml", "waits")
MODELS: dict[str, str] = table(__file__, "meta_device.toml", "models")
FAULTS = {"value": "asks for values", "copy": "a copy blocks", "tolist": "tolist asks for values",
          "wait": "a wait for the device", "mixed": "expected device meta"}
COVER = (("tp2 pp2 dp2 zero3", False), ("gemma2 pp2 zero3 documents", True), ("sp2 cp2 ring zero2", False),
         ("dropout, tp2 sequence", True), ("mixtral with a capacity", False))  # and whether as the last rank
PART = 8  # cases of one process, which imports transformers once


def stepped(cases: Sequence[tuple[list[Any], bool, str | None]]) -> list[dict[str, Any]]:
    """Step in a process without a GPU: (configuration, whether as the last rank, a fault that is planted)."""
    lines = []
    for (model, keys, further, *_), last, fault in cases:
        degrees = {key: f'"{value}"' if isinstance(value, str) and value != "true" else value for key, value in keys.items()}
        overrides = ['job.device="cuda"', 'train.precision="bf16"', *layout(**degrees), *(f"{key}" for key in further)]
        job = JOB.format(model=MODELS[model])
        lines.append(json.dumps({"job": job, "overrides": overrides, "last": last, "fault": fault}))
    program = Path(layouts.__file__).with_name("meta_device.py")
    done = subprocess.run([sys.executable, program], input="\n".join(lines) + "\n", capture_output=True, text=True, check=False,
                          env=os.environ | {"OMP_NUM_THREADS": "1"})
    assert done.returncode == 0, done.stderr
    return [json.loads(line) for line in done.stdout.splitlines()]


def ends(names: Sequence[str]) -> list[tuple[str, bool]]:
    """Every configuration with its first rank and its last."""
    return [(name, last) for name in names for last in (False, True)]


def check(cases: Sequence[tuple[str, bool]], results: Sequence[dict[str, Any]]) -> None:
    for (name, last), result in zip(cases, results, strict=True):
        assert not result["error"], (name, last, result["error"])
        assert sum(result["waits"].values()) == (WAITS[name][3] if name in WAITS else 0), (name, last, result["waits"])


@pytest.fixture(scope="module")
def quick() -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """The results of the quick configurations, and those of the faults, of one process."""
    cases = [*((CASES[name], last, None) for name, last in COVER), *((CASES["one rank"], False, fault) for fault in FAULTS)]
    results = stepped(cases)
    return results[:len(COVER)], results[len(COVER):]


def test_a_step_waits_for_nothing(quick: Any) -> None:
    check(COVER, quick[0])


def test_what_breaks_a_step_is_seen(quick: Any) -> None:
    """The same with faults: a value, a copy, a list, a wait; a tensor of the host among those of the device raises."""
    for (fault, words), result in zip(FAULTS.items(), quick[1], strict=True):
        assert any(words in what for what in (*result["waits"], result["error"])), fault


@pytest.mark.prove
@pytest.mark.parametrize("begin", range(0, len(CASES), PART))
def test_no_step_waits(begin: int) -> None:
    cases = ends(list(CASES)[begin:begin + PART])
    check(cases, stepped([(CASES[name], last, None) for name, last in cases]))


@pytest.mark.prove
def test_a_host_waits_where_it_has_to_know_numbers_of_rows() -> None:
    """Once in the forward of each block with experts, and again where that is recomputed."""
    cases = ends(list(WAITS))
    check(cases, stepped([(WAITS[name], last, None) for name, last in cases]))
