"""``python fake_cli.py launch …`` is ``hpc-mp launch …`` with the fake ranks of ``emulated.py``, without torch."""

import dataclasses
import functools
import sys
from types import ModuleType, SimpleNamespace

import emulated

import hpc_mp.launch.backends.local
import hpc_mp.launch.launch
from hpc_mp.cli.main import main
from hpc_mp.launch.backends import BACKENDS

report = ModuleType("hpc_mp.report.page")
report.write_report = lambda run: run.report  # type: ignore[attr-defined]
sys.modules["hpc_mp.report.page"] = report
hpc_mp.launch.backends.local.family_of = lambda _: SimpleNamespace(modules=())
BACKENDS["local"] = dataclasses.replace(BACKENDS["local"],
                                        start=functools.partial(hpc_mp.launch.backends.local.start, entry=emulated.ENTRY))
hpc_mp.launch.backends.local.CHECK = emulated.NO_WARNING
hpc_mp.launch.launch.check_model = lambda *_, **__: []

if __name__ == "__main__":
    main()
