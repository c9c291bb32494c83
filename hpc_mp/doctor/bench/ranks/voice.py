"""How ranks speak to whoever started them: marked lines of JSON, among whatever else is printed."""

from __future__ import annotations

import json
import os
import sys
from typing import Any

from hpc_mp.doctor.bench.events import MARK


class Voice:
    """Takes standard output for itself; what libraries print there goes to standard error from now on."""

    def __init__(self) -> None:
        sys.stdout.flush()
        self._out = os.dup(1)
        os.dup2(2, 1)

    def say(self, event: str, **facts: Any) -> None:
        data = f"{MARK}{json.dumps({'event': event} | facts, separators=(',', ':'))}\n".encode()
        while data:
            data = data[os.write(self._out, data):]
