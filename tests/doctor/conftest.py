"""Time for checks: what does not hang must answer however busy the machine of the tests is. Tests of what hangs set less."""

import pytest

from hpc_mp.cluster.node import mounts
from hpc_mp.doctor import gate

PATIENCE_S = 120.0


@pytest.fixture(autouse=True)
def _patient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(mounts, "_PATIENCE_S", PATIENCE_S)
    monkeypatch.setattr(gate, "DEADLINE_S", PATIENCE_S)
