"""Numbers and lists as people read them: units, rounding, plurals, what a slip of the pen was to be."""

import ast
from collections.abc import Callable
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

import hpc_mp
from hpc_mp.base import text as texts
from hpc_mp.base.text import ago, counted, data_size, did_you_mean, duration, loss_number, memory_size, nearest, number, several

KEYS = ("tensor", "pipeline", "context", "zero")


TEXTS: dict[Callable[[float], str], dict[float, str]] = {
    memory_size: {0: "0 B", 512: "512 B", 1023: "1023 B", 1024: "1 KiB", 1.5 * 2**30: "1.5 GiB", 1023 * 2**20: "1023 MiB",
                  1023.7 * 2**20: "1 GiB", 79.6 * 2**30: "79.6 GiB", 2**60: "1024 PiB"},
    data_size: {191_937_100_000: "192 GB", 8_123_456: "8.12 MB", 999: "999 B", 999_700: "1 MB", 1000: "1 kB", 12e15: "12 PB"},
    texts.data_rate: {41.52: "41.5 GB/s", 0.0015: "1.5 MB/s", 0.0: "0 B/s", 450: "450 GB/s"},
    duration: {2e-5: "20 µs", 0.0133: "13.3 ms", 1.234: "1.23 s", 59.9: "59.9 s", 59.97: "1 min", 200: "3 min 20 s", 3600: "1 h",
               7500: "2 h 5 min", 3605: "1 h", 86400 * 3 + 3600 * 4 + 59: "3 d 4 h", 0: "0 s", -3: "0 s"},
    ago: {-3: "just now", 0.9: "just now", 1: "1 s ago", 53.2: "53 s ago", 59.7: "1 min ago", 200: "3 min ago", 3599: "1 h ago",
          47 * 3600: "2 d ago", 86400 * 40: "40 d ago"},
    number: {0.47251: "0.4725", 12.0: "12", 2041.4: "2,041", 1e20: "1e+20"},
}


@pytest.mark.parametrize(("words", "value", "text"), [(words, *row) for words, rows in TEXTS.items() for row in rows.items()])
def test_a_number_in_words(words: Callable[[float], str], value: float, text: str) -> None:
    assert words(value) == text


@given(st.integers(1, 10**18))
def test_sizes_are_right_to_three_digits(count: int) -> None:
    for said, base, units in ((memory_size(count), 1024, texts.BINARY), (data_size(count), 1000, texts.DECIMAL)):
        value, unit = said.split()
        assert abs(float(value) * base ** units.index(unit) - count) <= 0.0051 * count
        assert unit == units[-1] or float(value) < base


@pytest.mark.parametrize(("loss", "text", "change"), [
    (4.31751, "4.3175", "+4.3175"), (0.0312, "0.0312", "+0.0312"), (3.12e-7, "3.12e-07", "+3.12e-07"), (0.0, "0.0000", "+0.0000"),
    (-0.001234, "-0.001234", "-0.001234"), (1234567.8, "1.235e+06", "+1.235e+06"), (float("nan"), "nan", "+nan")])
def test_losses(loss: float, text: str, change: str) -> None:
    assert (loss_number(loss), loss_number(loss, "+")) == (text, change)


def test_counts() -> None:
    assert [counted(n, "node") for n in (0, 1, 2, 1024)] == ["0 nodes", "1 node", "2 nodes", "1,024 nodes"]
    assert counted(2, "switch", "switches") == "2 switches"
    assert several(["a", "b", "c"], 2) == "a, b and 1 more" and several(["a", "b"], 2) == "a, b"


def test_a_slip_of_the_pen() -> None:
    assert did_you_mean("tensr", KEYS) == "did you mean 'tensor'?"
    assert did_you_mean("TENSOR", KEYS) == "did you mean 'tensor'?", "case does not count"
    assert did_you_mean("xyz", KEYS) == "" and did_you_mean("xyz", KEYS, "choose one") == "choose one"
    assert did_you_mean("contensor", KEYS, likeness=0.5, limit=2) == "did you mean 'tensor' or 'context'?"
    assert nearest("tensr", KEYS, 0.95) == [], "a linter that asks for more likeness hears nothing"


def test_nobody_else_compares_words() -> None:
    """The two questions have one answer: no other file of the package has difflib's likeness of words. Its diff of two texts is
    something else, and may be had by name."""
    root = Path(hpc_mp.__file__).parent

    def imports(file: Path) -> set[str]:
        names = set()
        for node in ast.walk(ast.parse(file.read_text(encoding="utf-8"))):
            names |= {alias.name for alias in node.names} if isinstance(node, ast.Import) else set()
            if isinstance(node, ast.ImportFrom) and {alias.name for alias in node.names} != {"unified_diff"}:
                names.add(node.module or "")
        return names

    assert [str(file.relative_to(root)) for file in root.rglob("*.py")
            if "difflib" in file.read_text(encoding="utf-8") and "difflib" in imports(file)] == ["base/text.py"]
