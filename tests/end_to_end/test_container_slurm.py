"""Programs in a container of apptainer, and of pyxis, on a real Slurm. The image has a shell alone, and this machine's /usr."""

import shutil
import subprocess
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest
import tomli_w
from lab_runs import HARD, check_cause, ended, hpc_mp, newest
from slurm_lab.lab import Lab
from slurm_lab.pyxis import lab_with_pyxis, why_not_pyxis
from tables import table

from hpc_mp.rundir import RunDirectory
from hpc_mp.rundir.history import history

pytestmark = [pytest.mark.prove, pytest.mark.timeout(400)]
NO_APPTAINER = pytest.mark.skipif(shutil.which("apptainer") is None, reason="apptainer is not installed (Debian sid has it)")
NO_PYXIS = pytest.mark.skipif(why_not_pyxis() is not None, reason=str(why_not_pyxis()))
RUNTIMES = {"img": "apptainer", "sqsh": "auto"}  # by an image's name; hpc-mp finds pyxis by itself
USRMERGED = ("bin", "lib", "lib64", "sbin")
EMPTY = ("usr", "etc", "proc", "sys", "dev", "tmp", "var/tmp", "root", "run")
# Every rank writes its words, each ended by a zero byte, and what it finds; then it ends as its rank is told to.
PROGRAM = table(__file__, "container_slurm.toml", "program")


@pytest.fixture(scope="module", params=[
    pytest.param("apptainer", marks=NO_APPTAINER), pytest.param("pyxis", marks=NO_PYXIS)])
def runtime(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.fixture(scope="module")
def lab(runtime: str, request: pytest.FixtureRequest) -> Iterator[Lab]:
    """That of all tests, or one whose hosts have pyxis."""
    if runtime == "apptainer":
        yield request.getfixturevalue("lab")
    else:
        with lab_with_pyxis() as made:
            yield made


@pytest.fixture
def here(here: Path, runtime: str) -> Path:
    image = here / "image.img"  # apptainer takes a directory as well as a file
    for name in EMPTY:
        (image / name).mkdir(parents=True)
    for name in USRMERGED:
        (image / name).symlink_to(f"usr/{name}")
    (image / "of-the-image").write_text("")
    (image / "etc" / "environment").write_text("RANK=77\nMASTER_ADDR=image\nTMPDIR=/image\n")  # enroot's place of an image's own
    if runtime == "pyxis":
        subprocess.run(["mksquashfs", image, here / "image.sqsh", "-quiet", "-no-progress"], check=True)
    (here / "program.sh").write_text(PROGRAM)
    (here / "staged").write_text("copied")
    return here


def run(lab: Lab, here: Path, *arguments: str, command: Sequence[str] = ("sh", "program.sh"), more: str = "") -> RunDirectory:
    """To its end, as an ordinary user on two hosts with two ranks each."""
    image = "sqsh" if (here / "image.sqsh").exists() else "img"
    tree = {
        "job": {"name": "contained", "nodes": 2, "ranks_per_node": 2, "time_limit": "00:10:00"},
        "program": {"command": [*command, *arguments], "environment": {"OWN": "$own"}, "stage": ["staged"]},
        "slurm": {"container": f"image.{image}", "container_runtime": RUNTIMES[image], "container_mounts": ["/usr:/usr:ro"]},
        "environment": {"health": False}}
    (here / "job.toml").write_text(tomli_w.dumps(tree))
    done = hpc_mp(lab, here, "launch", "job.toml", "--on", "slurm", "--wait", *more.split(), user="nobody")
    assert list(here.glob("runs/*/0*")), done.stdout + done.stderr
    return newest(here)


def test_every_rank_gets_what_it_would_outside(lab: Lab, here: Path) -> None:
    found = run(lab, here, *HARD)
    assert ended(found).state == "completed", found.srun_log.read_text()
    for rank in range(4):
        assert (here / f"said-{rank}.1").read_bytes() == b"".join(word.encode() + b"\0" for word in HARD)
        assert (here / f"found-{rank}.1").read_text() == f"{rank} 4 {rank % 2} {rank // 2} n1 $own no copied\n"
    assert found.program_script.stat().st_mode & 0o077 == 0, "its variables may be passwords"


@pytest.mark.parametrize(("how", "kind", "words"), [
    ("exit", "exit", "exit code 3"), ("segv", "crash", "SIGSEGV"), ("silent", "hang", "no rank has printed a line")])
def test_the_rank_that_fails_is_named(lab: Lab, here: Path, how: str, kind: str, words: str) -> None:
    cause = check_cause(run(lab, here, how, more="--set program.silent_limit=15 --set slurm.retries=0"), kind, words)
    assert how == "silent" or (cause.rank, cause.node) == (3, "n2"), "nobody can tell which of silent ranks is to blame"


def test_a_killed_rank_is_queued_again(lab: Lab, here: Path) -> None:
    found = run(lab, here, "kill")
    assert [(end.kind, end.rank) for end in history(found)] == [("signal", 3), ("completed", None)], history(found)
    assert (ended(found).state, found.attempt()) == ("completed", 2)
    assert (here / "found-3.2").read_text() == "3 4 1 1 n1 $own 1 copied\n"


def test_what_is_not_there(lab: Lab, here: Path) -> None:
    """A program that the image has not, and an image that is not there: the user's to mend, not queued again."""
    check_cause(run(lab, here, command=("nothing",)), "user", "program.command[0] = 'nothing': does not exist in the container")
    other = "other.sqsh" if (here / "image.sqsh").exists() else "other.img"
    check_cause(run(lab, here, more=f"--set slurm.container={other}"), "user", other)


def test_the_time_limit_is_told_to_each_rank(lab: Lab, here: Path) -> None:
    found = run(lab, here, "silent", more="--set job.time_limit=1 --set slurm.grace=15 --set program.resumes=true")
    assert (ended(found).state, found.attempt()) == ("completed", 2), found.srun_log.read_text()
    first = found.path / "attempts" / "1" / "log"
    said = "".join(path.read_text() for path in sorted(first.glob("node-*.log")))
    counts = [said.count(f"{rank}: asked") for rank in range(4)]
    assert all(count in (1, 2) for count in counts), f"{counts}: apptainer passes on what Slurm sends its processes too\n{said}"
