"""HM35x: launchers of a node's ranks, and mpirun: their nodes, and the resulting number of ranks."""

import itertools
import re
from collections.abc import Iterable, Iterator

from hpc_mp.base.findings import Hit, Rule
from hpc_mp.base.launchers import LAUNCHERS, MPIRUNS
from hpc_mp.base.rule_table import rules_of
from hpc_mp.base.text import counted
from hpc_mp.lint.sbatch.header import Step
from hpc_mp.lint.sbatch.programs import NodeLauncher, is_training, node_launcher
from hpc_mp.lint.sbatch.rules.finders import of_commands
from hpc_mp.lint.sbatch.script import Script, gpus
from hpc_mp.lint.sbatch.shell import Word, inner_script

NODES_ELSEWHERE = {"deepspeed": "DLTS_HOSTFILE", "torchrun": "PET_NNODES"}  # variables that name a launcher's nodes
_OF_SLURM = re.compile(r"\$\{?(SLURM_[A-Z_]+)")
_MPI_TASKS = re.compile(r"--?(?:np?|ntasks)(?:=(\d+))?")
_MORE = ("--oversubscribe", "-oversubscribe", ":OVERSUBSCRIBE", ":oversubscribe", "--hostfile", "-hostfile", "-f", "--host",
         "-host")


def _once(script: Script) -> Iterator[NodeLauncher]:
    """Yield launchers that run in the job's own shell, hence on its first node."""
    if script.nodes > 1 and script.starts_here:
        for command in script.shell.commands:
            if not command.captured and (launcher := node_launcher(command.words)):
                yield launcher


def _in_steps(script: Script) -> Iterator[tuple[Step, NodeLauncher]]:
    for step in script.steps:
        if launcher := node_launcher(step.program):
            yield step, launcher


def _each_by_itself(script: Script) -> Iterable[Hit]:
    for step, launcher in _in_steps(script):
        alone = launcher.alone and not launcher.elsewhere and launcher.key != "deepspeed"
        many = step.value("nodes") or str(script.of(step).nodes)
        if alone and many.isdecimal() and int(many) > 1 and script.several_tasks(step) and not step.opaque \
                and not script.sets("PET_NNODES") and not {"standalone"} & launcher.options.keys():
            yield Hit(launcher.line, launcher.name, many)


def _nodes_that_the_job_lacks(script: Script) -> Iterable[Hit]:
    limit = re.fullmatch(r"(?:\d+-)?(\d+)", script.value("nodes") or "")
    for launcher in itertools.chain(_once(script), (launcher for _, launcher in _in_steps(script))):
        minimum = re.match(r"\d+", launcher.machines)
        if limit and minimum and int(minimum[0]) > int(limit[1]) and len(script.header.components) == 1:
            yield Hit(launcher.line, f"{launcher.name} waits for {minimum[0]} nodes", limit[1])


def _tasks_without_gpus(script: Script) -> Iterable[Hit]:
    for step in script.steps:
        job = script.of(step)
        many = step.value("ntasks-per-node") or (None if step.option("ntasks") else job.value("ntasks-per-node")) or ""
        gpu_count = 0 if gpus(step.options) else gpus(job.options)
        if many.isdecimal() and int(many) > gpu_count > 0 and is_training(step.program) and not job.option("exclusive") \
                and not node_launcher(step.program) and "mps" not in script.text.lower():
            yield Hit(step.line, f"{many} tasks on a node", str(gpu_count))


def _more_ranks_than_tasks(script: Script) -> Iterable[Hit]:
    request = script.option("ntasks") or script.option("ntasks-per-node")
    for command in script.commands(*MPIRUNS):
        free = any(any(more in argument for more in _MORE) for argument in command.arguments) or command.task
        for word, following in itertools.pairwise((*command.words[1:], Word("", 0))):
            match = _MPI_TASKS.fullmatch(word.text)
            number = (match[1] or following.text) if match else ""
            if match and request and number.isdecimal() and int(number) > script.tasks and not free \
                    and (script.value("nodes") or "1").isdecimal():
                yield Hit(word.line, f"{command.name} starts {counted(int(number), 'rank')}", str(script.tasks))


def _more_tasks_than_the_job(script: Script) -> Iterable[Hit]:
    for step in script.steps:
        job, ntasks = script.of(step), step.value("ntasks") or ""
        cpus, of_task = job.number("cpus-per-task") or 1, step.value("cpus-per-task") or "1"
        whole_nodes = job.option("exclusive") or step.option("overcommit") or not (job.option("ntasks") or
                                                                                  job.option("ntasks-per-node"))
        if ntasks.isdecimal() and of_task.isdecimal() and not whole_nodes and not step.opaque \
                and int(ntasks) * int(of_task) > job.tasks * cpus and (job.value("nodes") or "1").isdecimal():
            yield Hit(step.line, counted(int(ntasks), "task"), str(job.tasks))


RULES: tuple[Rule[Script], ...] = rules_of("slurm/script-rules.toml", {
    "HM351": lambda script: (Hit(launcher.line, str(script.nodes)) for launcher in _once(script)
                            if launcher.key == "accelerate" and launcher.machines not in ("", "1")),
    "HM352": lambda script: (Hit(launcher.line, launcher.name, str(script.nodes)) for launcher in _once(script)
                            if (launcher.alone or launcher.key == "deepspeed") and not launcher.elsewhere
                            and not script.sets(NODES_ELSEWHERE.get(launcher.key, ""))),
    "HM353": _each_by_itself,
    "HM354": _nodes_that_the_job_lacks,
    "HM355": lambda script: (Hit(launcher.line, launcher.name, LAUNCHERS[launcher.key].node_rank.replace("-", "_"))
                            for step, launcher in _in_steps(script)
                            if not launcher.alone and script.several_tasks(step) and not launcher.meets and (
                                launcher.rank.isdecimal() or
                                (launcher.key == "accelerate" and not launcher.rank and not launcher.elsewhere))),
    "HM356": of_commands(lambda script, command: (
        f"{launcher.name} starts {launcher.per_node} processes on a node", str(gpus(script.options)))
        if command.name != "srun" and (launcher := node_launcher(command.words)) and launcher.per_node.isdecimal()
        and int(launcher.per_node) > gpus(script.options) > 0 and not script.option("exclusive") else None),
    "HM357": _tasks_without_gpus,
    "HM358": _more_ranks_than_tasks,
    "HM359": _more_tasks_than_the_job,
    # Words with a Slurm variable that the job's shell does not expand.
    "HM360": lambda script: (Hit(word.line, match[1]) for step in script.steps
                            if is_training(step.program) and not inner_script(step.program) for word in step.program
                            if not word.expands and "$(" not in word.text and (match := _OF_SLURM.search(word.text))),
})
