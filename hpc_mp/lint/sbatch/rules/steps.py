"""HM30x–HM32x: srun lines, and commands that need srun."""

import itertools
import re
from collections.abc import Iterable

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.launchers import MPIRUNS
from hpc_mp.base.rule_table import rules_of
from hpc_mp.cluster.slurm.option_syntax import Option
from hpc_mp.lint.sbatch.header import Step
from hpc_mp.lint.sbatch.programs import is_training, torchrun
from hpc_mp.lint.sbatch.rules.finders import HitWords, of_commands, of_steps, of_variables
from hpc_mp.lint.sbatch.rules.request import drops_the_rest, names_of
from hpc_mp.lint.sbatch.script import Script, asks_for_gpus, gpus
from hpc_mp.lint.sbatch.shell import Command, ShellAssignment, inner_script, read_shell

INHERITS_CPUS = ((22, 5), (23, 11))  # srun does not inherit them from the first release until before the second
CPU_VARIABLES = ("SLURM_CPUS_PER_TASK", "SRUN_CPUS_PER_TASK")
GPU_FLAGS = frozenset({"--nv", "--nvccli", "--rocm"})
CONTAINERS = ("apptainer", "singularity", "enroot", "podman", "docker", "shifter", "sarus", "ch-run")
INSPECTIONS = frozenset({"ldd", "hostname", "nvidia-smi", "which"})  # programs that are no run: their exit code tells nothing
NAMING = ("which", "type", "command", "echo", "man")  # commands that name another command without starting it


def _lost_cpus(script: Script, step: Step) -> HitWords:
    affected = script.version is None or INHERITS_CPUS[0] <= script.version < INHERITS_CPUS[1]
    cpus = script.of(step).value("cpus-per-task") or "1"
    lost = affected and cpus != "1" and is_training(step.program) and not step.opaque and not step.option("cpus-per-task")
    return f"--cpus-per-task={cpus}" if lost and not script.sets("SRUN_CPUS_PER_TASK") else None


def _left_behind(script: Script) -> Iterable[Hit]:
    last = max((command.line for command in script.shell.commands if command.name in ("wait", "sleep")
                or (_is_work(command) and not command.background and not command.task)), default=0)
    for command in script.shell.commands:
        if command.background and _is_work(command) and not command.task and command.line > last:
            yield Hit(command.line, command.name)


def _is_work(command: Command) -> bool:
    return command.name in ("srun", *MPIRUNS) or is_training(command.words)


def _mpi_in_step(script: Script) -> Iterable[Hit]:
    """Yield MPI launchers in a step, also inside a container: after the image, or after the mpirun that starts the container."""
    for command in script.shell.commands:
        inside = command.task or command.name in MPIRUNS
        contained = inside and any(word.base in CONTAINERS for word in command.words)
        launchers = command.words[:1] if command.name in MPIRUNS and command.task else [
            word for before, word in itertools.pairwise(command.words if contained else ()) if word.base in MPIRUNS
            and before.base not in NAMING and not re.fullmatch("-[^=]*[^=-]", before.text)]
        yield from (Hit(word.line, word.base) for word in launchers[:1])


def _one_after_another(script: Script) -> Iterable[Hit]:
    """Yield programs of a task whose failure a later program hides: it runs anyway and decides the exit code."""
    for step in script.steps:
        inner = inner_script(step.program)
        if inner is None or re.search(r"\$\?|^\s*trap\b", inner.text, re.MULTILINE) or any(
                re.fullmatch(r"-[a-z]*e[a-z]*", word.text) for word in step.program if word is not inner):
            continue
        commands = [command for command in read_shell(inner.text, inner.line).commands if not command.captured]
        programs = [command for command in commands if is_training(command.words) and not command.background]
        options = [word for command in commands if command.name == "set" for word in command.arguments]
        if len(programs) > 1 and not any(re.fullmatch(r"-[a-z]*e[a-z]*", word) for word in options):
            yield from (Hit(command.line, command.name) for command in programs[:-1] if not command.tested)


def _launchers_times_tasks(script: Script) -> Iterable[Hit]:
    for step in script.steps:
        job = None if step.option("ntasks") else script.value("ntasks-per-node")
        per_node = step.value("ntasks-per-node") or job or "1"
        inner = inner_script(step.program)
        commands = [command.words for command in read_shell(inner.text, inner.line).commands] if inner else [step.program]
        for launcher in filter(None, map(torchrun, commands)):
            if per_node.isdecimal() and int(per_node) > 1 and launcher.per_node not in ("", "1"):
                yield Hit(launcher.line, per_node)


def _hidden_exit_code(script: Script, command: Command) -> HitWords:
    is_run = _is_work(command) and not any(word.base in INSPECTIONS for word in command.words)
    hidden = is_run and command.piped and not command.captured and not command.task and not command.background
    shown = script.shell_option("", "pipefail") or "PIPESTATUS" in script.text
    return (command.name, command.piped[-1]) if hidden and not shown else None


def _swallowed_exit_code(script: Script) -> Iterable[Hit]:
    batch = [command for command in script.shell.commands if not command.task and not command.captured]
    if script.shell_option("e", "errexit") or re.search(r"\$\?|\$\{\?\}|PIPESTATUS", script.text):
        return
    for command, following in itertools.pairwise(batch):
        if following is batch[-1] and following.name in ("echo", "date", "printf") and command.name == "srun" \
                and not command.tested and not command.background:
            yield Hit(command.line, following.name)


def _two_cpu_counts(script: Script, variable: ShellAssignment) -> HitWords:
    cpus = script.value("cpus-per-task")
    differs = cpus and variable.value.isdecimal() and variable.value != cpus and not variable.task
    inherited = script.version is None or script.version >= INHERITS_CPUS[1]
    return (f"{variable.name}={variable.value}", f"--cpus-per-task={cpus}") if differs and inherited else None


def _order_from_nowhere(script: Script) -> Iterable[Hit]:
    named = script.sets("SLURM_HOSTFILE")
    for options in (script.options, *(step.options for step in script.steps)):
        names = {option.name for option in options}
        for option in options:
            if option.name == "distribution" and (option.value or "").startswith("arbitrary") and not named \
                    and not {"nodelist", "nodefile"} & names:
                yield Hit(option.line)


def _more_than_the_job(script: Script) -> Iterable[Hit]:
    """Yield steps larger than the job. Source: srun 22.05.8 ("Only allocated 2 nodes asked for 4")."""
    for step in script.steps:
        if step.opaque:
            continue
        job = script.of(step)
        requested, available = _nodes(step.option("nodes"), 1), _nodes(job.option("nodes"), 2)
        many = step.value("ntasks") or (str(job.tasks) if job.option("ntasks") or job.option("ntasks-per-node") else None)
        started = int(many) if many and many.isdecimal() else requested  # with fewer tasks than nodes, srun takes fewer nodes
        if requested > available > 0 and started >= requested:
            yield Hit(_line(step, "nodes"), f"{requested} nodes", str(available))
        requested, available = gpus(step.options), gpus(job.options)
        if requested > available > 0 and not job.option("exclusive"):  # an exclusive job has all GPUs of its nodes
            yield Hit(_line(step, "gpus-per-node", "gres"), f"{requested} GPUs per node", str(available))


def _line(step: Step, *names: str) -> int:
    return next(option.line for option in reversed(step.options) if option.name in names)


def _nodes(option: Option | None, end: int) -> int:
    """Return the minimum (``end`` 1) or maximum (2) of ``--nodes=2-4``; 0 if it is not numeric."""
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", (option.value or "") if option else "")
    return int(match[end] or match[1]) if match else 0


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM301": of_steps(lambda script, step: is_training(step.program) and script.several_tasks(step) and not step.opaque
                      and step.option("kill-on-bad-exit") is None  # 0 decides it too (hpc-mp)
                      and not script.sets("SLURM_KILL_BAD_EXIT")),
    "HM302": of_steps(_lost_cpus),
    "HM303": of_steps(lambda script, step: (script.value("export") or "").upper() in ("NONE", "NIL") and not step.opaque
                      and not step.option("export") and not script.sets("SLURM_EXPORT_ENV")
                      and not any("SLURM_EXPORT_ENV" in unset.arguments for unset in script.commands("unset"))),
    "HM304": lambda script: (Hit(option.line, names_of(option)) for step in script.steps
                            if (option := step.option("export")) and drops_the_rest(option)),
    "HM305": _left_behind,
    "HM306": _mpi_in_step,
    "HM321": _one_after_another,
    "HM307": lambda script: (Hit(command.line) for command in script.commands("srun")
                            if command.task and "--overlap" not in command.arguments),
    "HM308": _launchers_times_tasks,
    "HM309": of_commands(lambda script, command: str(script.nodes) if (launcher := torchrun(command.words))
                         and not launcher.alone and not command.captured and script.nodes > 1 and script.starts_here else None),
    "HM310": of_commands(lambda script, command: str(script.tasks) if command.name.startswith("python")
                         and is_training(command.words) and not torchrun(command.words) and not command.captured
                         and script.tasks > 1 and script.starts_here else None),
    "HM311": lambda script: (Hit(command.line, command.name) for command in script.commands("sbatch", "salloc")
                            if not ("env" in command.prefixes or {"--export=NONE", "--export=NIL"} & set(command.arguments))),
    "HM314": of_commands(_hidden_exit_code),
    "HM315": _swallowed_exit_code,
    "HM316": of_variables(CPU_VARIABLES, _two_cpu_counts),
    "HM317": _order_from_nowhere,
    "HM318": lambda script: [Hit(script.steps[0].line, str(len(script.header.components)))] if (
        len(script.header.components) > 1 and script.steps
        and not any(step.option("het-group") or step.opaque for step in script.steps)) else [],
    "HM319": of_commands(lambda script, command: command.name if command.name in ("apptainer", "singularity")
                         and command.arguments[:1] in (("exec",), ("run",)) and is_training(command.words)
                         and not GPU_FLAGS & set(command.arguments) and not any("$" in word for word in command.arguments)
                         and any(asks_for_gpus(option) for option in script.options) else None),
    "HM320": _more_than_the_job,
})
