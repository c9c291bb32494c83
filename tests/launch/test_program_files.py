"""What is looked at before a program is started: its files, commands that start ranks by themselves, sizes that nobody gave."""

import shlex
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest
from launching import executable
from tables import table

from hpc_mp.base.errors import HpcMpError
from hpc_mp.cli.run import name_of
from hpc_mp.cluster.slurm.allocation import Where, allocated_tasks
from hpc_mp.job import ProgramSpec, resolve_any
from hpc_mp.launch.facts import ClusterFacts
from hpc_mp.launch.program.files import check_files
from hpc_mp.launch.program.launchers import check_command, launcher
from hpc_mp.launch.program.plan import size_of


def spec(here: Path, *command: str, start: str = "rank", nodes: int = 1, **slurm: object) -> ProgramSpec:
    found = resolve_any({"job": {"nodes": nodes}, "slurm": slurm,
                         "program": {"command": list(command), "start": start, "directory": str(here)}}, here)
    assert isinstance(found, ProgramSpec)
    return found


@pytest.fixture
def here(tmp_path: Path) -> Path:
    (tmp_path / "train.py").write_text("")
    (tmp_path / "run.sh").write_text("#!/bin/sh\n")
    executable(tmp_path, "tool", "")
    return tmp_path


def test_what_may_be_there(here: Path) -> None:
    """A path from the root may be in a container or on the nodes alone; what other programs do with their words nobody knows."""
    for words in ("python train.py", "python -u train.py --x", "python3.11 -m pkg", "./tool", "torch", "/opt/no/such",
                  "python /in/container.py", "python -c pass", "bash nothing.sh", "python -X importtime nothere.py"):
        check_files(spec(here, *words.split()), in_script=True)


@pytest.mark.parametrize(("words", "said"), table(__file__, "program_files.toml", "absent"))
def test_what_is_not_there(here: Path, words: str, said: str) -> None:
    with pytest.raises(HpcMpError) as refused:
        check_files(spec(here, *words.split()), in_script=False)
    assert said in str(refused.value) and refused.value.remedy


def test_a_file_of_the_directory_is_not_looked_up_on_path(here: Path) -> None:
    with pytest.raises(HpcMpError, match=r"(?i)is a file of .* write \./train.py, or its interpreter") as refused:
        check_files(spec(here, "train.py"), in_script=True)
    assert refused.value.value == "program.command[0] = 'train.py'"
    check_files(spec(here, "train.py", setup=["PATH=.:$PATH"]), in_script=True)
    check_files(spec(here, "nowhere.py"), in_script=True)


@pytest.mark.parametrize(("text", "rule"), [(None, "cannot be read"), ("srun ./a\n", "does not begin with #!")])
def test_a_job_script_that_sbatch_would_refuse(here: Path, text: str | None, rule: str) -> None:
    if text is not None:
        (here / "job.sbatch").write_text(text)
    job = spec(here, "job.sbatch", start="script")
    with pytest.raises(HpcMpError, match=rule):
        check_files(job, in_script=True)
    (here / "job.sbatch").write_text("#!/bin/bash\nsrun ./a\n")
    check_files(job, in_script=True)


# --- commands that start ranks by themselves --------------------------------------------------------------------------


def refusal(spec: ProgramSpec) -> HpcMpError | None:
    """Return what is said of a command before it is started, if anything."""
    try:
        check_command(spec)
    except HpcMpError as error:
        return error
    return None


@pytest.mark.parametrize(("words", "said"), table(__file__, "program_files.toml", "launchers"))
def test_the_numbers_of_the_launcher_are_those_of_the_remedy(here: Path, words: str, said: str) -> None:
    refused = refusal(spec(here, *words.split()))
    assert refused is not None and said in refused.remedy


COMMANDS = tomllib.loads(Path(__file__).with_name("commands.toml").read_text(encoding="utf-8"))


@pytest.mark.parametrize(("command", "found"), COMMANDS["starts_ranks"].items())
def test_a_command_that_starts_ranks_by_itself(command: str, found: str) -> None:
    assert (launcher(command.split()) or "") == found
    refused = refusal(spec(Path("/"), *command.split()))
    assert (refused is not None) == bool(found)
    if refused is not None:
        assert f"starts ranks by itself ({found})" in refused.rule and "hpc-mp run --nodes" in refused.remedy


@pytest.mark.parametrize(("command", "nodes", "words", "script"), [(*row, "")[:4] for row in COMMANDS["on_every_node"]])
def test_a_command_that_is_started_on_every_node(here: Path, command: str, nodes: int, words: str, script: str) -> None:
    (here / "run.sh").write_text(script)
    refused = refusal(spec(here, *shlex.split(command), start="node", nodes=nodes))
    assert words in str(refused) if words else refused is None
    assert refused is None or not words.startswith("(") or 'slurm.mpi = "mpirun"' in refused.remedy


# --- sizes ------------------------------------------------------------------------------------------------------------

SALLOC = {"SLURM_JOB_NUM_NODES": "3", "SLURM_TASKS_PER_NODE": "4(x3)"}


@pytest.mark.parametrize(
    ("given", "place", "environ", "gpus", "nodes", "each", "why"), table(__file__, "program_files.toml", "sizes"))
def test_sizes_that_nobody_has_given(given: list[int | None], place: str, environ: dict[str, str], gpus: int,
                                     nodes: int, each: int, why: str) -> None:
    decided: Callable[[str], Where] = lambda _: Where(place, "")  # noqa: E731
    around = SALLOC | environ if place == "step" else environ
    found = size_of(spec(Path("/"), "x"), *given, "auto", around, decided, lambda _: ClusterFacts(), lambda: gpus)
    assert (found.nodes, found.ranks_per_node) == (nodes, each) and why in found.why
    nothing = allocated_tasks({})
    assert (nothing.nodes, nothing.tasks_per_node, nothing.gpus_per_node) == (1, 0, 0)


def test_what_a_run_is_called() -> None:
    for words, name in ((("python", "src/train.py", "--x"), "train"), (("./solve",), "solve"), (("bash", "a b.sh"), "a-b"),
                        (("python", "-m", "pkg.train"), "python"), (("漢.py",), "program"), (("/",), "program")):
        assert name_of(words) == name
