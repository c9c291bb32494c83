"""``hpc-mp`` whose emulated ranks do not begin the step ``WAIT_STEP`` (from 1) while the file ``WAIT_FILE`` is there."""

from __future__ import annotations

import dataclasses
import functools
import os
import time
from pathlib import Path
from typing import Any


def rank(job_file: Path) -> int:
    import hpc_mp.train.rank.main
    from hpc_mp.train.rank import trainer

    step_ = trainer.Trainer._step

    def step(self: Any, number: int, *rest: Any) -> Any:
        while number + 1 == int(os.environ["WAIT_STEP"]) and os.path.exists(os.environ["WAIT_FILE"]):
            time.sleep(0.05)
        return step_(self, number, *rest)

    trainer.Trainer._step = step  # type: ignore[method-assign]
    return hpc_mp.train.rank.main.main(job_file)


if __name__ == "__main__":
    import hpc_mp.launch.backends.local
    from hpc_mp.cli.main import main
    from hpc_mp.launch.backends import BACKENDS

    start = functools.partial(hpc_mp.launch.backends.local.start, entry="paced:rank")
    BACKENDS["local"] = dataclasses.replace(BACKENDS["local"], start=start)
    main()
