"""The layout of a run directory: one table of its files, which the code, the documentation and the tests read. ``layout.toml``
says what each holds, and who writes and reads it."""

import re
import tomllib
from dataclasses import dataclass
from pathlib import Path
from string import Formatter
from typing import Self, overload

MARKER = "complete.json"  # in a checkpoint: its JSON files with their SHA-256; they list the others. Required for loading
COUNTERS = "state.json"  # in a checkpoint: training progress, and the origin of the state
STEP = "step-"  # a checkpoint's directory is this prefix and the step, in eight digits


@dataclass(frozen=True, slots=True)
class RunFile:
    """A file or folder of a run directory; ``run.metrics`` is its path in the run directory ``run``. ``name``: path relative to
    the run directory. A folder's name ends with "/"."""

    name: str

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...

    @overload
    def __get__(self, run: "RunDirectory", owner: type) -> Path: ...

    def __get__(self, run: "RunDirectory | None", owner: type) -> Self | Path:
        return self if run is None else run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A set of files, one per rank, host, job, step or attempt. ``run.rank_log(3)`` is the file of rank 3 in the run directory
    ``run``. ``name``: path with a field of ``str.format`` for each value, ``log/rank-{rank:05d}.log``."""

    name: str

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...

    @overload
    def __get__(self, run: "RunDirectory", owner: type) -> "FilesOfRun": ...

    def __get__(self, run: "RunDirectory | None", owner: type) -> "Self | FilesOfRun":
        return self if run is None else FilesOfRun(run.path, self.name)


@dataclass(frozen=True, slots=True)
class FilesOfRun:
    """The files of one pattern in one run directory."""

    run: Path
    pattern: str

    def __call__(self, *values: int | str) -> Path:
        """Return the path for these values, in the pattern's order."""
        return self.run / self.pattern.format(**dict(zip(self._fields(), values, strict=True)))

    def found(self, *values: int | str) -> list[Path]:
        """Return the existing files, sorted by name. ``values`` fix the pattern's first fields."""
        fixed = dict(zip(self._fields(), values, strict=False))
        glob = "".join(_escaped(text) + ("" if field is None else _escaped(format(fixed[field], rule)) if field in fixed else "*")
                       for text, field, rule in self._parts())
        return sorted(self.run.glob(glob))

    def values(self, path: Path) -> tuple[str, ...]:
        """Return the values of the fields in a path that ``found`` returned."""
        pattern = "".join(re.escape(text) + ("" if field is None else "(.*)") for text, field, _ in self._parts())
        match = re.fullmatch(pattern.removesuffix("/"), str(path.relative_to(self.run)))
        assert match is not None, f"{path} does not match {self.pattern}"
        return match.groups()

    def _parts(self) -> list[tuple[str, str | None, str]]:
        return [(text, field, rule or "") for text, field, rule, _ in Formatter().parse(self.pattern)]

    def _fields(self) -> list[str]:
        return [field for _, field, _ in self._parts() if field is not None]


@dataclass(frozen=True, slots=True)
class RunDirectory:
    """The directory of one run, ``DIRECTORY/NAME/0001``, and the names of all its files."""

    path: Path

    job = RunFile("job.toml")
    placement = RunFile("placement.json")
    plan = RunFile("plan.json")
    verified = RunFile("verified.json")
    program = RunFile("program.json")
    program_script = RunFile("program.sh")
    user_script = RunFile("script")
    batch_environ = RunFile("batch.environ")
    bash_env = RunFile("bash-env.sh")
    shims = RunFile("shims/")
    script = RunFile("job.sbatch")
    clean_environment = RunFile("clean-environment.sh")
    measured = RunFile("cluster.json")
    environment = RunFile("environment.json")
    job_id = RunFile("job.id")
    successors = RunFile("successors.json")
    excluded = RunFile("excluded.json")
    watch_script = RunFile("watch.sbatch")
    watch_id = RunFile("watch.id")
    watch_log = RunFile("watch.log")
    sweep = RunFile("sweep.json")
    sweep_stop = RunFile("sweep.stop")
    lock = RunFile(".lock")
    stop = RunFile("stop")
    attempt_record = RunFile("attempt.json")
    status = RunFile("status.json")
    metrics = RunFile("metrics.jsonl")
    lost = RunFile("lost.jsonl")
    evaluations = RunFile("evaluations.jsonl")
    tensorboard = RunFile("tensorboard/")
    mlflow = RunFile("mlflow.db")
    ranks = RunFile("ranks.jsonl")
    tokenizer = RunFile("tokenizer.path")
    tokens = RunFile("tokens.names")
    history = RunFile("history.jsonl")
    outcome = RunFile("outcome.json")
    report = RunFile("report.html")
    comparison = RunFile("comparison.html")
    supervisor_log = RunFile("supervisor.log")
    slurm_log = RunFiles("slurm-{job}.log")

    log = RunFile("log/")
    main_log = RunFile("log/main.log")
    profile_log = RunFile("log/profile.log")
    srun_log = RunFile("log/srun.log")
    rank_log = RunFiles("log/rank-{rank:05d}.log")
    guards = RunFile("log/guards/")
    rank_host = RunFiles("log/host-{rank:05d}")
    rank_stack = RunFiles("log/stack-{rank:05d}.txt")
    flight = RunFiles("log/flight-{rank:05d}.json")
    node_log = RunFiles("log/node-{host}.log")
    kernel_log = RunFiles("log/kernel-{host}.log")
    nccl_logs = RunFiles("log/nccl/{host}/")
    launch = RunFiles("log/launch-{launch:04d}.json")
    script_end = RunFile("log/script-end.json")
    script_process = RunFile("log/script-process.json")
    task_end = RunFiles("log/end-{launch:04d}-{rank:05d}.json")
    memory = RunFiles("log/memory-{rank:05d}")

    node = RunFiles("nodes/{host}.json")
    failures = RunFile("failures/")
    failure = RunFiles("failures/attempt-{attempt}-rank-{rank:05d}.json")
    waits = RunFile("waits/")
    standing = RunFiles("waits/attempt-{attempt}-rank-{rank:05d}.json")
    first_failure = RunFiles("failures/attempt-{attempt}-first")
    traces = RunFile("trace/")
    trace = RunFiles("trace/rank-{rank:05d}.json")
    profile = RunFiles("trace/profile-{rank:05d}.json.gz")
    checkpoints = RunFile("checkpoints/")
    checkpoint = RunFiles(f"checkpoints/{STEP}{{step:08d}}/")
    counters = RunFiles(f"checkpoints/{STEP}{{step:08d}}/{COUNTERS}")
    index = RunFiles(f"checkpoints/{STEP}{{step:08d}}/index-{{stage:05d}}.json")
    marker = RunFiles(f"checkpoints/{STEP}{{step:08d}}/{MARKER}")
    attempts = RunFile("attempts/")
    put_away = RunFiles("attempts/{attempt}/")

    @property
    def cache(self) -> Path:
        """The tokenizers and token files, shared by all runs under the same ``job.directory``."""
        return self.path.parent.parent / ".cache"

    @property
    def removed(self) -> bool:
        """True if the run directory was removed; ranks may have recreated parts. False if the file system does not answer."""
        try:
            self.job.stat()
        except FileNotFoundError:
            return True
        except OSError:
            return False
        return False

    def attempt(self) -> int:
        """Return the number of the current attempt, from 1: one more than the archived attempts."""
        return 1 + sum(1 for path in self.put_away.found() if path.name.isdigit())

    def of_attempt(self, number: int) -> "RunDirectory":
        """Return the directory with the job, plan, placement and logs of an attempt: this one for the current attempt."""
        aside = self.put_away(number)
        return RunDirectory(aside) if number < self.attempt() and aside.is_dir() else self


FILES: tuple[RunFile | RunFiles, ...] = tuple(
    file for file in vars(RunDirectory).values() if isinstance(file, RunFile | RunFiles))
"""Every file of a run, in the order of the documentation."""


def described() -> dict[str, dict[str, str]]:
    """Return what each file holds, its writer and its readers, by its name."""
    return tomllib.loads(Path(__file__).with_suffix(".toml").read_text(encoding="utf-8"))


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
