"""The cases that `make test` leaves to `make prove` because of their cost, read from ``tests/long.tsv``.

A line has the CPU seconds of a case, with all processes that it starts, a tab, and its name. A case is listed if it takes more
than 3 s and others show the same, or if the cheaper cases of its function already take 1 s. This file is a pytest plugin.
"""

from pathlib import Path

import pytest

LIST = Path(__file__).resolve().parents[1] / "long.tsv"


def long_cases() -> dict[str, float]:
    """Return CPU seconds by name of the case."""
    rows = (line.split("\t") for line in LIST.read_text(encoding="utf-8").splitlines())
    return {name: float(seconds) for seconds, name in rows}


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark the long cases before pytest evaluates marks."""
    names = long_cases()
    for item in items:
        if item.nodeid in names:
            item.add_marker(pytest.mark.prove)
