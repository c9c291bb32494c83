"""Conversion of a script's launch line to ``[program]``: start per rank or per node, the sizes, and the words of the command.

The form is chosen that preserves the program's arguments, world size and variables. A torchrun whose options are all known is
removed, because hpc-mp gives each rank what torchrun would. Any other launcher starts its ranks itself, once on every node.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

from hpc_mp.adopt.expand import FixedValues, WordPiece, arithmetic, pieces
from hpc_mp.adopt.launches import MPI, LaunchCall
from hpc_mp.adopt.request import Request
from hpc_mp.base.programs import IDENTITY, PYTHON
from hpc_mp.launch.program.launchers import launcher
from hpc_mp.launch.program.plan import PLUGINS

WORDS = "ADOPTED_WORDS"
TORCH_MODULES = ("torch.distributed.run", "torch.distributed.launch")
# Options of torchrun: the rendezvous and the number of ranks, which hpc-mp provides; then everything else.
MEETING = frozenset({"nnodes", "nproc-per-node", "node-rank", "master-addr", "master-port", "rdzv-backend", "rdzv-endpoint",
                     "rdzv-id", "rdzv-conf", "standalone", "local-addr", "nnode"})
BESIDES = frozenset({"max-restarts", "monitor-interval", "log-dir", "r", "redirects", "t", "tee", "role", "start-method",
                     "local-ranks-filter", "use-env", "m", "module", "no-python", "event-log-handler", "logs-specs"})
FLAGS = frozenset({"standalone", "module", "m", "no-python", "use-env", "run-path"})
MEET = (("--nnodes", "$NNODES", "{nodes}"), ("--node-rank", "$NODE_RANK", "{node_rank}"),
        ("--nproc-per-node", "", "{ranks_per_node}"), ("--master-addr", "$MASTER_ADDR", "{master_addr}"),
        ("--master-port", "$MASTER_PORT", "{master_port}"))
MACHINES = (("--num_machines", "$NNODES", "{nodes}"), ("--machine_rank", "$NODE_RANK", "{node_rank}"),
            ("--main_process_ip", "$MASTER_ADDR", "{master_addr}"), ("--main_process_port", "$MASTER_PORT", "{master_port}"))
OF_MACHINES = frozenset({"num-machines", "machine-rank", "main-process-ip", "main-process-port", "num-processes"})
OF_DEEPSPEED = frozenset({"num-gpus", "num-nodes", "hostfile", "h", "master-addr", "master-port", "launcher", "launcher-args",
                          "node-rank", "ssh-port"})
OF_GPUS = frozenset({"gpus", "gpus-per-node", "gpus-per-task", "gres"})
DEEPSPEED_FLAGS = frozenset({"no-ssh", "no-ssh-check", "force-multi", "no-local-rank"})


@dataclass(frozen=True, slots=True)
class ProgramStart:
    """The way in which the program is started.

    Attributes:
        words: the words of ``program.command``.
        before: lines of the job's shell that the words need.
        how: the fate of the launch line, for the account.
        lost: the parts of the launch line that could not be carried over.
        environment: variables that the launcher set.
        mpi: the MPI plug-in of srun.
        reads: True if the words redirect a file or a text to standard input.
        results: True if the words also redirect the output.
    """

    start: Literal["rank", "node", "mpi"]
    nodes: int
    ranks_per_node: int
    words: tuple[WordPiece, ...]
    how: tuple[str, ...] = ()
    lost: tuple[str, ...] = ()
    before: tuple[str, ...] = ()
    environment: Mapping[str, str] = field(default_factory=dict)
    mpi: str | None = None
    reads: bool = False
    results: bool = False


def slurm_numbers(request: Request) -> dict[str, str]:
    """Return Slurm's variables in the script's own shell, as far as they are numbers that follow from its directives."""
    nodes, gpus = request.nodes or 1, request.gpus.count if request.gpus else None
    tasks = str(request.total_tasks)
    found = {"SLURM_NNODES": str(nodes), "SLURM_JOB_NUM_NODES": str(nodes), "SLURM_NTASKS": tasks, "SLURM_NPROCS": tasks,
             "SLURM_NTASKS_PER_NODE": str(request.tasks_per_node)}
    if request.cpus:
        found["SLURM_CPUS_PER_TASK"] = str(request.cpus)
    if gpus:
        found |= {"SLURM_GPUS_ON_NODE": str(gpus), "SLURM_GPUS_PER_NODE": str(gpus)}
    return found


def number_in(text: str | None, request: Request) -> int | None:
    """Return the number that a word evaluates to, Slurm's variables included; None if it is not known."""
    if not text:
        return None
    plain = re.sub(r"\$\{(\w+):?-[^{}]*\}", r"$\1", text)
    for candidate in (plain, re.sub(r"\$\{\w+:?-(\d+)\}", r"\1", text)):
        found = arithmetic(candidate.replace("$((", "(").replace("))", ")"), slurm_numbers(request))
        if found:
            return found
    return None


def program_start(launch: LaunchCall, request: Request, fixed: FixedValues) -> ProgramStart:
    """Return the way in which the program of a launch line is started."""
    nodes, tasks = _step_sizes(launch, request) if launch.srun else (1, 1)
    gpus = request.gpus.count if request.gpus and request.gpus.count else None
    every = _step_gpus(launch, request) or gpus
    texts = launch.texts
    name = texts[0].rpartition("/")[2] if texts else ""
    asked = request.nodes or 1
    if (module := _torch_at(texts)) is not None:
        return _torchrun(launch, module, nodes if launch.srun else asked, every, request, fixed)
    if name in MPI:
        return _mpi(launch, asked, request, fixed)
    if name == "deepspeed" and asked > 1 and not launch.srun and (found := _deepspeed(launch, asked, every, request, fixed)):
        return found
    inside = starts_ranks(texts)
    if inside is not None and "accelerate" in inside and name == "accelerate":
        return _accelerate(launch, nodes if launch.srun else asked, every, request, fixed)
    words, before = written(launch, launch.program, fixed)
    if inside is not None or ((every or 1) > 1 and tasks == 1):
        count = _processes(texts, request) if inside is not None else None
        ranks = count or every or 1
        why = "it has all GPUs of its node" if launch.srun else "without srun it runs once"
        if inside is not None:
            why = f"{inside} starts its ranks itself"
        at = next((number for number, text in enumerate(texts) if text.rpartition("/")[2] in ("torchrun", *TORCH_MODULES)), None)
        if at is not None and nodes > 1:  # after its wrapper: a container, numactl
            words, before = _meeting(launch, _options(texts, at + 1, FLAGS)[0], at, ranks, fixed)
        how = f"once for every node, for {why}"
        return ProgramStart("node", nodes, ranks, words, (how,), _idle(launch, asked, nodes), before)
    if not launch.srun:
        return ProgramStart("node", 1, 1, words, ("once, on one node, as without srun",), _idle(launch, asked, 1), before)
    asked_mpi = (launch.value("mpi") or "none").partition("_v")[0]
    lost: tuple[str, ...] = () if asked_mpi in ("none", *PLUGINS) else (
        f"--mpi={asked_mpi}: slurm.mpi takes {', '.join(PLUGINS)}; set the one that the program's MPI knows",)
    meets = asked_mpi if asked_mpi in PLUGINS else None
    lost += _unknown_sizes(launch, request, nodes, tasks)
    if request.gpus is None and (asked_gpus := [each for each in launch.options if each.name in OF_GPUS]):
        lost += (f"srun's --{asked_gpus[-1].name}={asked_gpus[-1].value}, where no directive asks for GPUs: set "
                 "slurm.gpu_request if they are not there without it",)
    said = ("srun: replaced by hpc-mp's own, with a task for every rank", *([f"--mpi: slurm.mpi = {meets}"] if meets else []))
    return ProgramStart("rank", nodes, tasks, words, said, lost, before, mpi=meets)


FIRST = ("bash", "-c", '[ "$NODE_RANK" = 0 ] || exit 0; exec "$@"', "bash")


def on_first(start: ProgramStart, launch: LaunchCall, request: Request) -> ProgramStart:
    """Let a program that runs once keep all nodes of the job, on which earlier lines have started steps that it works with."""
    several = start.nodes > 1 or (start.ranks_per_node > 1 and start.start != "node") or starts_ranks(launch.texts) is not None
    if (request.nodes or 1) < 2 or several:
        return start
    gpus = request.gpus.count if request.gpus and request.gpus.count else 1
    words = (*(WordPiece("literal", text) for text in FIRST), *start.words)
    gone = _idle(launch, request.nodes or 1, start.nodes)
    return replace(start, start="node", nodes=request.nodes or 1, ranks_per_node=gpus, words=words, mpi=None,
                   lost=tuple(each for each in start.lost if each not in gone), how=(
                       "once, on the first node, beside the steps that the lines before it have started",))


def _idle(launch: LaunchCall, asked: int, nodes: int) -> tuple[str, ...]:
    if launch.srun or asked <= nodes:
        return ()
    return (f"--nodes={asked}: without srun it runs on the first node alone, and the job has that one; whatever it starts on the "
            "others by itself has to become program.command",)


def _unknown_sizes(launch: LaunchCall, request: Request, nodes: int, tasks: int) -> tuple[str, ...]:
    """Return a remark if srun is given a size that the script's text does not reveal."""
    found = [f"--{name}={value}" for name in ("nodes", "ntasks", "ntasks-per-node")
             if (value := launch.value(name)) and number_in(value, request) is None]
    return (f"srun's {', '.join(found)} is known to the job's shell alone: {nodes} × {tasks} ranks are taken; set job.nodes, "
            "job.ranks_per_node",) if found else ()


def _step_sizes(launch: LaunchCall, request: Request) -> tuple[int, int]:
    """Return the number of nodes of an srun, and the number of tasks on each."""
    nodes, ntasks, per_node = (number_in(launch.value(name), request) for name in ("nodes", "ntasks", "ntasks-per-node"))
    if nodes is None and ntasks is None and per_node is None:
        return request.nodes or 1, request.tasks_per_node
    if per_node is not None and (ntasks := ntasks or request.ntasks):  # an upper limit per node
        per_node = min(per_node, -(-ntasks // (nodes or request.nodes or 1)))
    if ntasks is not None and nodes is None and per_node is None:
        allocated = request.nodes or 1
        nodes = min(allocated, ntasks)
        if ntasks < allocated * request.tasks_per_node and ntasks % nodes:
            nodes = 1
    nodes = nodes or (-(-ntasks // per_node) if ntasks and per_node else request.nodes or 1)
    if per_node is None:
        per_node = -(-ntasks // nodes) if ntasks is not None else request.tasks_per_node if nodes == (request.nodes or 1) else 1
    return nodes, per_node


def _step_gpus(launch: LaunchCall, request: Request) -> int | None:
    for name in ("gpus-per-node", "gres", "gpus"):
        if (found := re.search(r"(\d+)$", launch.value(name) or "")) is not None and "gpu" in f"{name}{launch.value(name)}":
            return int(found[1])
    return None


def written(launch: LaunchCall, at: int, fixed: FixedValues) -> tuple[tuple[WordPiece, ...], tuple[str, ...]]:
    """Return the words from number ``at`` on as written, and the lines they need if a variable holds words of both sides."""
    arguments = launch.call.arguments
    if arguments[0].source == "eval":
        sources = " ".join(each.source for each in arguments[1:])
        return (WordPiece("batch", f'"${{{WORDS}[@]:{at}}}"'),), (f"eval '{WORDS}=(' {sources} ')'",)
    if launch.boundary(at):
        first = launch.words[at][1] if at < len(launch.words) else len(arguments)
        return tuple(piece for each in arguments[first:] for piece in pieces(each.source, fixed)), ()
    begin = launch.words[0][1]
    sources = " ".join(each.source for each in arguments[begin:])
    return (WordPiece("batch", f'"${{{WORDS}[@]:{at}}}"'),), (f"{WORDS}=({sources})",)


def _torch_at(texts: Sequence[str]) -> int | None:
    """Return the index of the word that names torchrun, counting a Python in front of it; None for another program."""
    if not texts:
        return None
    if texts[0].rpartition("/")[2] == "torchrun":
        return 0
    if PYTHON.fullmatch(texts[0].rpartition("/")[2]):
        for at, text in enumerate(texts[1:5], start=1):
            if text == "-m" and texts[at + 1:at + 2] and texts[at + 1] in TORCH_MODULES:
                return at + 1
    return None


def _options(texts: Sequence[str], at: int, flags: Iterable[str]) -> tuple[list[tuple[str, str, int, int]], int]:
    """Return the options before the first other word as (dashed name, value, first word, word after), and that word's index."""
    found = []
    while at < len(texts) and texts[at].startswith("-") and texts[at] != "--":
        written_name, equals, value = texts[at].partition("=")
        name = written_name.lstrip("-").replace("_", "-")
        begin = at
        at += 1
        if not equals and name not in flags and at < len(texts):
            value = texts[at]
            at += 1
        found.append((name, value, begin, at))
    return found, at


def _torchrun(launch: LaunchCall, module: int, nodes: int, gpus: int | None, request: Request,
              fixed: FixedValues) -> ProgramStart:
    texts = launch.texts
    options, script = _options(texts, module + 1, FLAGS)
    said = {name: value for name, value, _, _ in options}
    lost: list[str] = []
    ranks = number_in(said.get("nproc-per-node"), request) or (
        gpus or 1 if "nproc-per-node" in said else 1)
    if not launch.srun:
        nodes = number_in(re.sub(r"^\d+:", "", said.get("nnodes", "1")), request) or nodes
        lost += _idle(launch, request.nodes or 1, nodes)
    elif said.get("nnodes", "1") in ("1", "1:1") and nodes > 1 and "nnodes" in said:
        lost.append(f"--nnodes={said['nnodes']} on {nodes} nodes: each trained by itself, and now they are one world")
    name = "torchrun" if module == 0 else f"python -m {texts[module]}"
    old = texts[module] == "torch.distributed.launch" and "use-env" not in said
    base = launch.program
    if old or set(said) - MEETING - BESIDES or script >= len(texts) or not launch.boundary(launch.program + script):
        words, before = _meeting(launch, options, module, ranks, fixed)
        why = "it gives each script --local-rank" if old else "an option of it is not known from the script's text"
        return ProgramStart("node", nodes, ranks, words, (f"{name}: once for every node, for {why}",), tuple(lost), before)
    program, before = written(launch, base + script, fixed)
    if "no-python" in said:
        front: tuple[WordPiece, ...] = ()
    elif module == 0:
        directory = texts[0].rpartition("torchrun")[0]
        front = (WordPiece("literal", f"{directory}python"), WordPiece("literal", "-u"))
    else:
        own = [piece for each in launch.call.arguments[launch.words[base][1]:launch.words[base + module - 1][1]]
               for piece in pieces(each.source, fixed)]
        front = (*own, *([] if any(piece.text == "-u" for piece in own) else [WordPiece("literal", "-u")]))
    if {"m", "module"} & said.keys():
        front = (*front, WordPiece("literal", "-m"))
    how = [f"{name}: replaced by start = \"rank\", which sets the same variables on {nodes} × {ranks} ranks; its options "
           f"({', '.join(f'--{each}' for each in said) or 'none'}) are hpc-mp's to say; TORCHELASTIC_… are not set, and "
           "SLURM_NTASKS counts ranks"]
    if int(said.get("max-restarts") or 0) if (said.get("max-restarts") or "0").isdecimal() else 0:
        how.append("--max-restarts: slurm.retries, after faults of machines")
    environment = {"OMP_NUM_THREADS": "1"} if ranks > 1 else {}
    return ProgramStart("rank", nodes, ranks, (*front, *program), tuple(how), tuple(lost), before, environment)


def _meeting(launch: LaunchCall, options: Sequence[tuple[str, str, int, int]], module: int, ranks: int,
             fixed: FixedValues) -> tuple[tuple[WordPiece, ...], tuple[str, ...]]:
    """Return a torchrun that is kept, with hpc-mp's rendezvous options. It is unchanged if the options are ambiguous."""
    base = launch.program
    ends = [base, base + module + 1, *(base + end for _, _, _, end in options)]
    if not all(map(launch.boundary, ends)):
        return written(launch, base, fixed)
    kept = [piece for name, _, begin, end in options if name not in MEETING
            for piece in _slice(launch, base + begin, base + end, fixed)]
    meet = _placeholders(MEET, ranks)
    head = _slice(launch, base, base + module + 1, fixed)
    tail, before = written(launch, ends[-1], fixed)
    return (*head, *meet, *kept, *tail), before


def _placeholders(rows: Iterable[tuple[str, str, str]], ranks: int) -> list[WordPiece]:
    return [piece for option, variable, placeholder in rows for piece in (
        WordPiece("literal", option), WordPiece("rank", f'"{variable}"' if variable else str(ranks), placeholder))]


def _slice(launch: LaunchCall, begin: int, end: int, fixed: FixedValues) -> list[WordPiece]:
    """Return the written words that the words from ``begin`` to ``end`` come from."""
    numbers = dict.fromkeys(number for _, number in launch.words[begin:end])
    return [piece for number in numbers for piece in pieces(launch.call.arguments[number].source, fixed)]


def _accelerate(launch: LaunchCall, nodes: int, gpus: int | None, request: Request, fixed: FixedValues) -> ProgramStart:
    """Keep accelerate, whose options and configuration set more than ranks, and replace its rendezvous options."""
    options, script = _options(launch.texts, 2, {"multi-gpu", "cpu", "tpu", "use-deepspeed", "use-fsdp", "use-megatron-lm", "m",
                                                 "same-network", "module", "no-python", "debug", "quiet", "q"})
    said = {name: value for name, value, _, _ in options}
    if not launch.srun:
        nodes = number_in(said.get("num-machines"), request) or 1
    total = number_in(said.get("num-processes"), request)
    ranks = max(1, total // nodes) if total else gpus or 1
    lost = _idle(launch, request.nodes or 1, nodes)
    base = launch.program
    ends = [base, base + 2, *(base + end for _, _, _, end in options)]
    if nodes == 1 or not all(map(launch.boundary, ends)):
        words, before = written(launch, base, fixed)
        return ProgramStart("node", nodes, ranks, words, ("accelerate launch: once for every node, where it starts its "
                                                          "ranks",), lost,
                            before)
    kept = [piece for name, _, begin, end in options if name not in OF_MACHINES
            for piece in _slice(launch, base + begin, base + end, fixed)]
    count = [WordPiece("literal", "--num_processes"), WordPiece("literal", str(nodes * ranks))]
    tail, before = written(launch, base + script, fixed)
    words = (*_slice(launch, base, base + 2, fixed), *_placeholders(MACHINES, ranks), *count, *kept, *tail)
    return ProgramStart("node", nodes, ranks, words, ("accelerate launch: once for every node; where the machines meet is "
                                                      "said by "
                                                      "hpc-mp",), lost, before)


def _deepspeed(launch: LaunchCall, nodes: int, gpus: int | None, request: Request, fixed: FixedValues) -> ProgramStart | None:
    """Replace deepspeed, which reaches other nodes by ssh, by ranks that srun starts; None if its options do not allow it."""
    options, script = _options(launch.texts, 1, DEEPSPEED_FLAGS)
    said = {name: value for name, value, _, _ in options}
    base = launch.program
    if set(said) - OF_DEEPSPEED - DEEPSPEED_FLAGS or script >= len(launch.texts) or not launch.boundary(base + script + 1) \
            or not launch.boundary(base + script):
        return None
    nodes = number_in(said.get("num-nodes"), request) or nodes
    ranks = number_in(said.get("num-gpus"), request) or gpus or 1
    tail, before = written(launch, base + script + 1, fixed)
    local = () if "no-local-rank" in said else (WordPiece("rank", '--local_rank="$LOCAL_RANK"'),)
    name = _slice(launch, base + script, base + script + 1, fixed)
    words = (WordPiece("literal", "python"), WordPiece("literal", "-u"), *name, *local, *tail)
    return ProgramStart("rank", nodes, ranks, words, (
        f"deepspeed: replaced by start = \"rank\" on {nodes} × {ranks} ranks, without ssh and hostfile; each gets "
        "--local_rank",), (),
        before)


def _mpi(launch: LaunchCall, nodes: int, request: Request, fixed: FixedValues) -> ProgramStart:
    """Replace mpirun by srun. Of its options, those that set variables are kept as variables."""
    texts, at = launch.texts, 1
    environment: dict[str, str] = {}
    total, per_node, left, unknown = None, None, [], ""
    while at < len(texts) and (texts[at].startswith("-") or texts[at].isdecimal()):
        name, equals, value = texts[at].lstrip("-").partition("=")
        count = 1 if equals else _MPI_VALUES.get(name, 1)
        if name in ("genv", "env") and "=" in "".join(texts[at + 1:at + 2]):  # ``-genv A=1``, which Intel MPI also accepts
            count = 2
        values = (value,) if equals else texts[at + 1:at + count]
        if name in _MPI_COUNTS:
            total = number_in(values[0] if values else None, request)
            unknown = values[0] if values and total is None else ""
        elif name in _MPI_PER_NODE and values:
            per_node = number_in(values[0], request)
        elif (found := _set_by_mpirun(name, values)) is not None:
            environment |= found
        elif name not in _MPI_SIZES:
            left.append(" ".join(texts[at:at + count]))
        at += count
    if per_node and (total or request.nodes):
        nodes, ranks = min(nodes, -(-total // per_node)) if total else nodes, per_node
    else:
        ranks = max(1, -(-total // nodes)) if total else request.tasks_per_node
    words, before = written(launch, launch.program + at if at < len(texts) else launch.program, fixed)
    expanded = {name: value for name, value in environment.items()  # expanded by the job's shell, or set only by hpc-mp
                if re.search(r"[$`]", value) or name in IDENTITY}
    if expanded:
        front = [piece for name, value in expanded.items() for piece in pieces(f'{name}="{value}"', fixed)]
        words = (WordPiece("literal", "env"), *front, *words)
    how = f"{texts[0]}: replaced by srun with Slurm's own MPI plug-in (slurm.mpi; left out: the first that the site has)"
    kept = (f"variables that it sets: {', '.join(environment)}",) if environment else ()
    lost: tuple[str, ...] = (f"options of {texts[0]} without a counterpart are left out: {', '.join(left)}",) if left else ()
    if unknown and not per_node and not _ALL_TASKS.search(unknown):
        lost += (f"-np {unknown} is known to the job's shell alone: {nodes} × {ranks} ranks are taken; set job.nodes, "
                 "job.ranks_per_node",)
    plain = {name: value for name, value in environment.items() if name not in expanded}
    return ProgramStart("mpi", nodes, ranks, words, (how, *kept), lost, before, plain)


def _set_by_mpirun(name: str, values: Sequence[str]) -> dict[str, str] | None:
    """Return the variables that an option of mpirun sets: ``-x A=1``, ``-genv A 1``, ``--mca btl tcp``; None for others."""
    if name == "x" and values:
        variable, equals, value = values[0].partition("=")
        return {variable: value} if equals else {}  # without a value it forwards the existing variable, as srun does
    if name in ("genv", "env") and values:
        variable, _, value = " ".join(values).replace(" ", "=", len(values) - 1).partition("=")
        return {variable: value}
    if name in ("mca", "gmca") and len(values) == 2:
        return {f"OMPI_MCA_{values[0]}": values[1]}
    return None


# Options of mpirun, mpiexec and similar launchers, and the number of words of each, values included.
_MPI_VALUES = {
    **dict.fromkeys(("mca", "genv", "env", "gmca"), 3),
    **dict.fromkeys(("x", "np", "n", "c", "ppn", "npernode", "N", "hostfile", "machinefile", "f", "host", "H", "hosts", "map-by",
                     "bind-to", "rank-by", "prefix", "wdir", "perhost", "ntasks", "tune", "bootstrap", "iface", "depth", "d",
                     "cpu-bind"), 2)}
_ALL_TASKS = re.compile(r"SLURM_(NTASKS|NPROCS|JOB_CPUS_PER_NODE|CPUS_ON_NODE)|NSLOTS")  # if no directive gives the number
_MPI_PER_NODE = frozenset({"ppn", "npernode", "N", "perhost", "ntasks-per-node"})
_MPI_COUNTS = frozenset({"np", "n", "ntasks", "c"})
# Options for hosts and sizes, which the job's own sizes replace; and those that allow root or forward all variables.
_MPI_SIZES = frozenset({"ppn", "npernode", "N", "hostfile", "machinefile", "f", "host", "H", "hosts", "perhost", "bootstrap",
                        "allow-run-as-root", "genvall", "envall", "oversubscribe", "prefix"})


def starts_ranks(texts: Sequence[str]) -> str | None:
    """Return the launcher that a program is, or that it starts as far as its words show."""
    return launcher(texts) or _inner(texts)


def _inner(texts: Sequence[str]) -> str | None:
    """Return the name of the launcher that a ``bash -c TEXT`` or a container starts."""
    text = " ".join(texts[1:])
    if not texts or texts[0].rpartition("/")[2] in ("python", "python3"):
        return None
    found = re.search(r"\b(torchrun|torch\.distributed\.(?:run|launch)|accelerate launch|deepspeed)(?=\s)", text)
    return found[1] if found else None


def _processes(texts: Sequence[str], request: Request) -> int | None:
    """Return the number of ranks that a launcher among the words starts per node."""
    text = " ".join(texts)
    found = re.search(r"--nproc[-_]per[-_]node[= ](\S+)", text) or re.search(r"--num[-_]gpus[= ](\S+)", text)
    return number_in(found[1].strip("\"'"), request) if found else None
