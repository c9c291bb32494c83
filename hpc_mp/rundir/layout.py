"""The layout of a run directory: one table of its files, which the code, the documentation and the tests read."""

import re
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
    the run directory. A folder's name ends with "/". ``writer``, ``readers``: the rooms, programs or people that write and read
    it. ``holds``: its content, in one sentence without a full stop."""

    name: str
    writer: str
    readers: str
    holds: str

    @overload
    def __get__(self, run: None, owner: type) -> Self: ...

    @overload
    def __get__(self, run: "RunDirectory", owner: type) -> Path: ...

    def __get__(self, run: "RunDirectory | None", owner: type) -> Self | Path:
        return self if run is None else run.path / self.name


@dataclass(frozen=True, slots=True)
class RunFiles:
    """A set of files, one per rank, host, job, step or attempt. ``run.rank_log(3)`` is the file of rank 3 in the run directory
    ``run``. ``name``: path with a field of ``str.format`` for each value, ``log/rank-{rank:05d}.log``. ``writer``, ``readers``,
    ``holds``: as in ``RunFile``."""

    name: str
    writer: str
    readers: str
    holds: str

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

    job = RunFile("job.toml", "launch", "every rank, supervisor, report, resume", "the resolved job: it reproduces the run")
    placement = RunFile("placement.json", "launch", "every rank, supervisor, report",
        "the node and the coordinates of every rank, and all groups")
    plan = RunFile("plan.json", "launch", "supervisor, status, report, resume",
        "the layers of every stage, bytes per axis and per rank, every choice with its reason")
    verified = RunFile("verified.json", "launch", "you",
        "what was compared with Hugging Face's own model before the first start, and the largest difference")
    program = RunFile("program.json", "launch", "every rank",
        "with `[program]`: the command of the ranks, its directory and its variables, byte for byte")
    program_script = RunFile("program.sh", "supervisor", "every rank",
        "with `[program]` in a container: the shell script that its ranks run there, equivalent to `program.json`")
    user_script = RunFile("script", "launch", "supervisor",
        "with `program.start = \"script\"`: the user's script as it was when the job was launched")
    batch_environ = RunFile("batch.environ", "job.sbatch", "supervisor",
        "the variables that Slurm gave the job script, for the user's script; removed once they are read")
    bash_env = RunFile("bash-env.sh", "supervisor", "every bash of the user's script",
        "commands that keep the programs of `shims/` first on its PATH")
    shims = RunFile("shims/", "supervisor", "the user's script",
        "replacements for srun, mpirun, torchrun and similar launchers, which have their ranks watched")
    script = RunFile("job.sbatch", "launch", "Slurm", "the rendered job script")
    clean_environment = RunFile("clean-environment.sh", "launch", "job.sbatch",
        "commands that unset variables of the submitting shell, with the reasons")
    measured = RunFile("cluster.json", "launch", "supervisor",
        "rates between the cluster's nodes when the job was launched, for the order of the hosts")
    environment = RunFile("environment.json", "launch", "supervisor",
        "the archive of the Python environment that nodes unpack, with environment.stage")
    job_id = RunFile("job.id", "launch", "status, logs, cancel, resume", "the id of the run's Slurm job")
    successors = RunFile("successors.json", "launch", "status, cancel, supervisor",
        "the ids of the jobs queued to continue the run, with slurm.chain")
    excluded = RunFile("excluded.json", "launch, supervisor", "supervisor, status",
        "the nodes that hpc-mp excludes, with the evidence; others in Slurm's list are excluded by the user")
    watch_script = RunFile("watch.sbatch", "launch, supervisor", "Slurm",
        "the script of the job that checks if excluded nodes are needed")
    watch_id = RunFile("watch.id", "launch, supervisor", "supervisor", "the id of that job")
    watch_log = RunFile("watch.log", "Slurm", "you", "the actions of that job")
    sweep = RunFile("sweep.json", "launch", "launch, status, cancel, report",
        "the run's number in its sweep, and its values that replace the job file's")
    sweep_stop = RunFile("sweep.stop", "cancel --all", "launch",
        "nothing: if it exists in the first run of a sweep, no further run is started on emulated nodes")
    lock = RunFile(".lock", "launch", "launch, status, cancel",
        "host, process and start of the launcher that has the run; it holds the lock of this file")
    stop = RunFile("stop", "cancel, or you", "rank 0, supervisor",
        "nothing: once it exists, ranks save at the next step and stop, and the job is not requeued")
    attempt_record = RunFile("attempt.json", "supervisor", "every rank",
        "the current attempt: its number and token, its hosts, the rendezvous address, and its time limit")
    status = RunFile("status.json", "rank 0", "launch, status, report", "the current activity of rank 0")
    metrics = RunFile("metrics.jsonl", "rank 0", "launch, status, report", "one line per optimizer step, each step once")
    lost = RunFile("lost.jsonl", "rank 0", "status, report",
        "lines removed from `metrics.jsonl`: steps that were trained, not saved, and trained again")
    evaluations = RunFile("evaluations.jsonl", "rank 0", "launch, status, report",
        "one line per evaluation on held-out text, each step once, with `evaluate.files`")
    tensorboard = RunFile("tensorboard/", "rank 0", "TensorBoard", "the same numbers as event files, with `track.to`")
    mlflow = RunFile("mlflow.db", "rank 0", "MLflow", "the same numbers for MLflow, with `track.to` and without a server")
    ranks = RunFile("ranks.jsonl", "every rank", "status, logs, report, supervisor",
        "one line per rank and attempt: node, host, pid, coordinates")
    tokenizer = RunFile("tokenizer.path", "rank 0", "export", "the directory of the tokenizer, in the cache")
    tokens = RunFile("tokens.names", "rank 0", "prune",
        "the directories of its training and evaluation tokens in the cache, one per line")
    history = RunFile("history.jsonl", "supervisor, resume", "supervisor",
        "one line per ended attempt: kind of end, step, blamed nodes, action")
    outcome = RunFile("outcome.json", "supervisor; on emulated nodes launch", "launch, status, logs, report",
        "the verdict: the end of the run and its reason; once it exists, the only answer")
    report = RunFile("report.html", "report", "you", "curves, layout, pipeline and memory as graphics")
    comparison = RunFile("comparison.html", "report", "you", "this run next to others, from `hpc-mp report RUN RUN`")
    supervisor_log = RunFile("supervisor.log", "supervisor", "you", "its output, without Slurm")
    slurm_log = RunFiles("slurm-{job}.log", "Slurm", "logs, launch, supervisor", "the output of the job script")

    log = RunFile("log/", "", "", "the logs of the current attempt")
    main_log = RunFile("log/main.log", "rank 0, failing ranks, supervisor", "logs, report", "the run in a few lines")
    profile_log = RunFile("log/profile.log", "supervisor", "you",
        "the variables that environment.profile set or left out for the ranks, with the reasons and the deciding node")
    srun_log = RunFile("log/srun.log", "srun", "logs, supervisor",
        "the output of srun and of the steps before and after the ranks")
    rank_log = RunFiles("log/rank-{rank:05d}.log", "one rank", "logs", "the output of one rank, if it has its own file")
    guards = RunFile("log/guards/", "the guard of a rank that mpirun has started without Slurm", "supervisor",
        "the process of each guard, and the exit codes of ranks")
    rank_host = RunFiles("log/host-{rank:05d}", "one rank", "supervisor",
        "the name of one rank's host: for a program, and if mpirun starts ranks without Slurm")
    rank_stack = RunFiles("log/stack-{rank:05d}.txt", "the recording of hung ranks, before they are ended",
        "supervisor, launch, you", "the stacks of the processes of one rank of a program, with every Python thread")
    flight = RunFiles("log/flight-{rank:05d}.json", "one rank that hangs, before it ends", "you",
        "the last messages of torch's process groups in one rank, and those under way (torch's flight recorder)")
    node_log = RunFiles("log/node-{host}.log", "srun", "logs, supervisor",
        "the output of the ranks of one node of a Slurm job, with the task number before each line")
    kernel_log = RunFiles("log/kernel-{host}.log", "slurm/node-end.sh", "supervisor",
        "after a failure: the kernel's messages about memory and GPUs")
    nccl_logs = RunFiles("log/nccl/{host}/", "slurm/node-end.sh", "you",
        "after a failure: NCCL's logs and flight recorder, at most 16 MiB per node")
    launch = RunFiles("log/launch-{launch:04d}.json", "a launcher in the user's script", "supervisor, you",
        "one launch of the user's script: its command, directory and time")
    script_end = RunFile("log/script-end.json", "the witness of the user's script", "supervisor",
        "the exit code of the user's script, and when it ended")
    script_process = RunFile("log/script-process.json", "supervisor", "supervisor",
        "the process of the user's script, for a supervisor that takes over after another one was killed")
    task_end = RunFiles("log/end-{launch:04d}-{rank:05d}.json", "the witness of a task", "supervisor",
        "the failure of one task of a launch, and its exit code")
    memory = RunFiles("log/memory-{rank:05d}", "one rank", "supervisor",
        "the bytes of host memory that a rank holds, or last held")

    node = RunFiles("nodes/{host}.json", "slurm/node-start.sh", "you",
        "the state of one node before the ranks started: GPUs, kernel, boot id, free disk space")
    failures = RunFile("failures/", "", "", "the failures of ranks")
    failure = RunFiles("failures/attempt-{attempt}-rank-{rank:05d}.json", "one rank, or launch on its behalf",
        "ranks, supervisor, launch, status, logs, report", "the failure of one rank: kind, message, traceback, coordinates")
    waits = RunFile("waits/", "", "", "the positions of stalled ranks")
    standing = RunFiles("waits/attempt-{attempt}-rank-{rank:05d}.json", "one rank", "supervisor, launch, report",
        "the position of one stalled rank, the message that it waits in, and its message counts")
    first_failure = RunFiles("failures/attempt-{attempt}-first", "one rank", "ranks",
        "nothing: the rank that created it reports to the main log")
    traces = RunFile("trace/", "", "", "the executed actions of ranks")
    trace = RunFiles("trace/rank-{rank:05d}.json", "one rank", "report", "one step of one rank: actions as executed, memory")
    profile = RunFiles("trace/profile-{rank:05d}.json.gz", "one rank", "Perfetto, report",
        "some steps of one rank as torch's profiler saw them, with `train.profile`")
    checkpoints = RunFile("checkpoints/", "", "", "the newest checkpoints")
    checkpoint = RunFiles(f"checkpoints/{STEP}{{step:08d}}/", "every rank", "ranks, resume, export",
        "parameters and optimizer state in safetensors files")
    counters = RunFiles(f"checkpoints/{STEP}{{step:08d}}/{COUNTERS}", "rank 0", "every rank",
        "the training progress, and the origin of the state: model, optimizer, tokenizer, text")
    index = RunFiles(f"checkpoints/{STEP}{{step:08d}}/index-{{stage:05d}}.json", "first rank of a stage", "ranks, export",
        "the files of the stage's tensors, with their hashes by block")
    marker = RunFiles(f"checkpoints/{STEP}{{step:08d}}/{MARKER}", "rank 0", "ranks, resume, export",
        "every JSON file of the checkpoint with its size and SHA-256; a checkpoint without it is never loaded")
    attempts = RunFile("attempts/", "", "", "earlier attempts")
    put_away = RunFiles("attempts/{attempt}/", "resume, supervisor", "logs, report",
        "job, plan, placement, script, verdict and logs of an earlier attempt, under the same names")

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


def _escaped(text: str) -> str:
    return re.sub(r"([*?[])", r"[\1]", text)
