"""``python fake_cli.py launch …`` is ``hpc-mp launch …`` with the fake ranks of ``emulated.py`` and no transformers."""

from __future__ import annotations

import functools
from types import SimpleNamespace

import emulated

import hpc_mp.cli.launch
import hpc_mp.launch.local
import hpc_mp.report
from hpc_mp.cli.main import main

hpc_mp.launch.local.family_of = lambda _: SimpleNamespace(modules=())
hpc_mp.cli.launch.launch_local = functools.partial(hpc_mp.launch.local.launch_local, entry=emulated.ENTRY)
hpc_mp.cli.launch.check_model = lambda *_, **__: []
hpc_mp.report.write_report = lambda run: run.report

if __name__ == "__main__":
    main()
