"""``python fake_cli.py launch …`` is ``hpc-mp launch …`` with the fake ranks of ``emulated.py``, without torch."""

from __future__ import annotations

import functools
import sys
from types import ModuleType, SimpleNamespace

import emulated

import hpc_mp.cli.launch
import hpc_mp.launch.backends.local
from hpc_mp.cli.main import main

report = ModuleType("hpc_mp.report")
report.write_report = lambda run: run.report  # type: ignore[attr-defined]
sys.modules["hpc_mp.report"] = report
hpc_mp.launch.backends.local.family_of = lambda _: SimpleNamespace(modules=())
hpc_mp.cli.launch.launch_local = functools.partial(hpc_mp.launch.backends.local.launch_local, entry=emulated.ENTRY)
hpc_mp.cli.launch.check_model = lambda *_, **__: []

if __name__ == "__main__":
    main()
