"""Judging what devices computed, with injected results; and measuring for real on this machine's processors."""

import io
import json
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from click.testing import CliRunner
from hypothesis import given
from hypothesis import strategies as st
from machines.tree import broken, tree
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.base.findings import Finding
from hpc_mp.cli.doctor import command
from hpc_mp.doctor.compute import Result, devices_here, judge, measure
from hpc_mp.doctor.compute.device import Pieces
from hpc_mp.doctor.compute.problem import KNOWN, bits, exact, whole
from hpc_mp.doctor.compute.program import main

KIND, SOFTWARE = "NVIDIA H100 80GB HBM3, 132 SM, 79 GiB", "torch 2.13.0, CUDA 12.8"
RATES = {"matmul bf16": 720.0, "memory": 2900.0, "host to device": 55.0, "device to host": 54.0, "to peer": 370.0}
BITS = {"bits bf16": "aa", "bits fp32": "bb"}


def gpus(count: int = 8, host: str = "n1") -> list[Result]:
    return [Result(host, f"cuda:{index}", KIND, SOFTWARE,
                   {what: rate * (1 + 0.004 * ((index * 5) % 7 - 3)) for what, rate in RATES.items()},
                   digests=BITS) for index in range(count)]


def nodes(count: int, **rates: float) -> list[Result]:
    return [Result(f"n{index}", "cpu", "Xeon, 4 CPUs", "torch 2.13.0, AVX512", {"matmul fp32": 1.0 + 0.01 * (index % 5), **rates},
                   digests={f"core {core}": "cc" for core in range(4)}, share=0.99) for index in range(count)]


def changed(results: list[Result], at: int, **changes: Any) -> list[Result]:
    results[at] = replace(results[at], **changes)
    return results


def slowed(results: list[Result], at: int, what: str, factor: float) -> list[Result]:
    return changed(results, at, rates=results[at].rates | {what: results[at].rates[what] * factor})


def ill(results: list[Result]) -> list[Finding]:
    return [finding for finding in judge(results) if finding.severity != "ok"]


def test_equal_ones_are_well() -> None:
    assert ill(gpus()) == [] == ill(nodes(40))
    assert {finding.code for finding in judge(gpus())} == {"compute-slow", "compute-unequal"}


@pytest.mark.parametrize(("results", "code", "severity", "subject", "words"), [
    *((slowed(gpus(), 5, what, factor), "compute-slow", severity, "n1 cuda:5", f"{what} ") for what, factor, severity in (
        ("matmul bf16", 0.5, "error"), ("matmul bf16", 0.85, "warning"), ("memory", 0.7, "error"), ("to peer", 0.5, "error"),
        ("to peer", 0.8, "warning"))),
    (changed(slowed(nodes(16), 3, "matmul fp32", 0.4), 3, share=0.41), "compute-slow", "error", "n3 cpu",
     "it got 41% of its CPUs' time"),
    (slowed(gpus(2), 1, "memory", 0.5), "compute-slow", "warning", "n1 cuda:0, n1 cuda:1", "two cannot tell"),
    (changed(gpus(), 2, digests=BITS | {"bits bf16": "ff"}), "compute-unequal", "error", "n1 cuda:2", ""),
    (changed(nodes(3), 1, digests=nodes(1)[0].digests | {"core 2": "ff"}), "compute-unequal", "error", "n1 cpu core 2", ""),
    (changed(gpus(), 0, wrong=("exact fp32",)), "compute-wrong", "error", "n1 cuda:0", ""),
    (changed(gpus(), 1, unsteady=("matmul bf16",)), "compute-unsteady", "error", "n1 cuda:1", ""),
    ([*gpus(), Result("n1", "cuda:8", error="no answer within 60 s")], "compute-failed", "error", "n1 cuda:8", "within 60 s"),
    (nodes(1, **{"slowest core against the median core": 0.3}), "compute-core", "warning", "n0 cpu", "")])
def test_what_is_ill_is_named(results: list[Result], code: str, severity: str, subject: str, words: str) -> None:
    (finding,) = ill(results)
    assert (finding.code, finding.severity, finding.subject) == (code, severity, subject)
    assert words in finding.message and finding.fix
    assert ("of its peers' median" in finding.message) == (code == "compute-slow" and "," not in subject)


def test_a_poor_copy_from_the_host_is_named() -> None:
    found = {(finding.code, finding.severity, finding.subject) for finding in ill(slowed(gpus(9), 0, "host to device", 0.5))}
    assert ("compute-host-copy", "error", "n1 cuda:0") in found


def test_one_has_nobody_to_compare_with() -> None:
    found = list(judge(gpus(1)))
    assert [(finding.code, finding.severity) for finding in found] == [("compute-slow", "ok")]
    assert "nothing to compare it with" in found[0].message


def test_only_equal_kinds_are_compared() -> None:
    old = [replace(result, host="n2", kind="NVIDIA A100-SXM4-40GB, 108 SM, 39 GiB",
                   digests={"bits bf16": "dd", "bits fp32": "ee"},
                   rates={what: rate * 0.45 for what, rate in result.rates.items()}) for result in gpus()]
    assert ill([*gpus(), *old]) == []


def test_an_answer_without_a_majority_names_all() -> None:
    half = [replace(result, digests={"bits fp32": "x" if index < 4 else "y"}) for index, result in enumerate(gpus())]
    (finding,) = ill(half)
    assert "no answer has a majority" in finding.message and finding.subject.count("cuda:") == 8


def test_links_and_clocks_are_judged_under_load() -> None:
    loaded = {"clock": 1410.0, "max clock": 1980.0, "pcie": 1.0, "max pcie": 5.0, "lanes": 8.0, "max lanes": 16.0,
              "reasons": 0x48}
    found = ill([replace(gpus(1)[0], loaded=loaded)])
    assert [(finding.code, finding.severity) for finding in found] == [("compute-pcie", "error"), ("compute-pcie", "error"),
                                                                     ("compute-throttle", "error")]
    assert "hw slowdown, hw thermal slowdown (event reasons 0x48), 1410 of 1980 MHz" in found[2].message
    assert ill([replace(gpus(1)[0],
                        loaded=loaded | {"pcie": 5.0, "lanes": 16.0, "reasons": 0x4})]) == []  # capped power is normal


@given(st.integers(3, 64), st.integers(0, 2**32 - 1), st.sampled_from([None, 0.5, 0.7]))
def test_noise_is_not_blamed_and_a_slow_one_is(count: int, seed: int, factor: float | None) -> None:
    noise = np.random.default_rng(seed)
    results = [replace(result, device=f"cuda:{index}", rates={"matmul bf16": float(700 * np.exp(noise.normal(0, 0.01)))})
               for index, result in enumerate(gpus(count))]
    if factor is not None:
        slowed(results, count // 2, "matmul bf16", factor)
    expected = [] if factor is None else [f"n1 cuda:{count // 2}"]
    assert [finding.subject for finding in ill(results)] == expected


def test_the_exact_problem_has_the_known_answer() -> None:
    left, right = exact()
    answer = left.astype(np.int64) @ right.astype(np.int64)
    assert whole(answer) == KNOWN == whole(left @ right)
    assert abs(answer).max() < 2**15
    answer[17, 5] += 1
    assert whole(answer) != KNOWN
    numbers = bits(64, 3)
    assert (numbers.min() >= -1) and (numbers.max() <= 1) and len(np.unique(numbers)) > 4000
    assert numbers[0, 0] != bits(64, 4)[0, 0]


class Faulty:
    kind, software, bus = "toy", "none", ""

    def __init__(self) -> None:
        self.calls = 0

    def check(self) -> Iterator[tuple[str, bool]]:
        yield "exact fp32", False

    def answers(self) -> Iterator[tuple[str, Callable[[], bytes]]]:
        yield "bits fp32", self._other

    def one_thread(self) -> None: ...

    def load(self, seconds: float) -> Iterator[tuple[str, Pieces]]:
        yield "matmul fp32", Pieces((1.0, 3.0, 2.0), False, 0.5)

    def copies(self) -> Iterator[tuple[str, Pieces]]:
        yield "host to device", Pieces((9.0,), True)

    def _other(self) -> bytes:
        self.calls += 1
        return bytes([self.calls])


def test_the_program_answers_every_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("hpc_mp.doctor.compute.program._device", lambda name: Faulty())
    out = io.StringIO()
    assert main(["cpu", "1"], io.StringIO("load\ncheck\ncopies\n"), out) == 0
    first, load, check, copies = map(json.loads, out.getvalue().splitlines())
    assert first["kind"] == "toy"
    assert load == {"rates": {"matmul fp32": 2.0}, "unsteady": ["matmul fp32"], "share": 0.5}
    assert (check["wrong"], check["unsteady"]) == (["exact fp32"], ["bits fp32"])
    assert copies["rates"] == {"host to device": 9.0}
    assert main(["cpu", "1"], io.StringIO("dance\n"), out) == 1
    assert "KeyError" in json.loads(out.getvalue().splitlines()[-1])["error"]


def test_devices_are_those_that_we_may_use() -> None:
    assert devices_here(tree("ndv5"), {}) == tuple(f"cuda:{index}" for index in range(8))
    assert devices_here(tree("ndv5"), {"CUDA_VISIBLE_DEVICES": "2,5"}) == ("cuda:0", "cuda:1")
    assert devices_here(tree("ndv5"), {"CUDA_VISIBLE_DEVICES": ""}) == ("cpu",)
    assert devices_here(tree("ethernet"), {}) == ("cpu",)


def script(tmp_path: Path, text: str) -> tuple[str, str]:
    (tmp_path / "device.py").write_text(text, encoding="utf-8")
    return sys.executable, str(tmp_path / "device.py")


def test_what_nvidia_smi_says_under_load_goes_to_its_gpu(tmp_path: Path) -> None:
    """By PCI address: a job's own numbers may differ from nvidia-smi's."""
    answers = ('import json, sys\nprint(json.dumps({"kind": "H100", "software": "s", "bus": "0003:00:00.0"}), flush=True)\n'
               'for line in sys.stdin:\n    print(json.dumps({"rates": {line.strip(): 1.0}}), flush=True)\n')
    source = broken("ndv5", {})
    result, = measure(["cuda:0"], 0.01, script(tmp_path, answers), source)
    assert result.error == ""
    assert result.rates == {"load": 1.0, "check": 1.0, "copies": 1.0}
    assert (result.loaded["pcie"], result.loaded["lanes"], result.loaded["clock"]) == (5.0, 16.0, 1980.0)


@pytest.mark.parametrize(("text", "limit", "error"), table(__file__, "doctor_compute.toml", "failing_devices"))
def test_a_device_that_fails_does_not_stop_the_others(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, text: str, limit: float,
                                                      error: str) -> None:
    monkeypatch.setattr("hpc_mp.doctor.compute.workers.START_S", limit)
    result, = measure(["cpu"], 0.01, script(tmp_path, text))
    assert error in result.error
    assert [finding.code for finding in judge([result])] == ["compute-failed"]


def test_for_real_on_these_processors() -> None:
    result, = measure(["cpu"], 0.1)
    assert (result.error, result.wrong, result.unsteady) == ("", (), ())
    assert result.software.startswith("torch ")
    assert result.rates["matmul fp32"] > 0 and result.rates["memory"] > 0 and 0 < (result.share or 0) <= 1.2
    assert set(result.digests) == {f"core {core}" for core in os.sched_getaffinity(0)}
    assert len(set(result.digests.values())) == 1
    assert {finding.code for finding in judge([result]) if finding.severity == "error"} == set()


def test_for_real_without_torch(tmp_path: Path) -> None:
    (tmp_path / "torch.py").write_text("raise ImportError('hidden')", encoding="utf-8")
    here = str(Path(__file__).parents[2])
    result, = measure(["cpu"], 0.1, environ={"PYTHONPATH": f"{tmp_path}:{here}"})
    assert (result.error, result.wrong, result.unsteady) == ("", (), ())
    assert result.software.startswith("numpy ")
    assert len(set(result.digests.values())) == 1


def test_the_command_measures_this_machine_and_no_recorded_one() -> None:
    done = CliRunner().invoke(command, ["--compute", "0.02", "--json"])
    codes = {finding["code"] for finding in json.loads(done.output)["findings"]}
    assert done.exit_code == 0 and {"compute-slow", "compute-unequal"} <= codes
    assert not any(code.startswith("limit") for code in codes)
    with pytest.raises(HpcMpError, match="needs the machine itself"):
        CliRunner().invoke(command, ["--compute", "1", "--root", "/"], standalone_mode=False, catch_exceptions=False)
