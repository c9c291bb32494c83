"""A window of torch's profiler: one trace of some consecutive steps, on the ranks that the job file chooses."""

from collections.abc import Callable
from pathlib import Path

import torch
from torch.profiler import ProfilerActivity, profile

from hpc_mp.job.spec import ProfiledSteps


class ProfilerWindow:
    """The window of one rank. ``file``: of its trace. ``say``: logs a line; a trace that cannot be written does not end a
    training."""

    def __init__(self, settings: ProfiledSteps, rank: int, device: torch.device, file: Path, say: Callable[[str], None]) -> None:
        self._settings, self._chosen, self._file, self._say = settings, rank in settings.on_ranks, file, say
        self._activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if device.type == "cuda" else [])]
        self._profiler: profile | None = None

    def before(self, step: int) -> None:
        """Open or close the window before a step, from 1."""
        window = range(self._settings.from_step, self._settings.from_step + self._settings.steps)
        if step not in window:
            self.close()
        elif self._profiler is None and self._chosen:
            self._say(f"torch's profiler traces steps {step} to {window[-1]}: {self._file}")
            self._profiler = profile(activities=self._activities)
            self._profiler.start()

    def close(self) -> None:
        """Write the trace if the window is open."""
        if self._profiler is None:
            return
        profiler, self._profiler = self._profiler, None
        profiler.stop()
        try:
            self._file.parent.mkdir(exist_ok=True)
            profiler.export_chrome_trace(str(self._file))
        except (OSError, RuntimeError) as error:
            self._say(f"warning: {self._file} cannot be written ({error})")
