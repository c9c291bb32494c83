"""Packing a Python environment: the copy works elsewhere when the original is gone; what cannot be packed is refused."""

import io
import json
import os
import subprocess
import sys
import tarfile
import venv
from pathlib import Path

import pytest
from rendering import executable

from hpc_mp.base.assets import asset
from hpc_mp.base.errors import HpcMpError
from hpc_mp.launch.staging import archive as stage
from hpc_mp.launch.staging.members import SYSTEM, Interpreter, interpreter, members, write_tar
from hpc_mp.rundir.records import StagedEnvironment

ODD = "node's disk & more|x"  # what sed, bash and tar must not trip over


@pytest.fixture
def environment(tmp_path: Path) -> Path:
    """A virtual environment with a package, a script of it, and a checkout installed editable."""
    prefix = tmp_path / "my env"
    venv.create(prefix, symlinks=True)
    library = next(prefix.glob("lib/python*/site-packages"))
    (library / "packed.py").write_text("VALUE = 'packed'\n")
    (library / "edited.pth").write_text(f"{tmp_path}/checkout\n")
    executable(tmp_path / "checkout/edited/__init__.py", "VALUE = 'edited'\n")
    executable(prefix / "bin" / "tool", f"#!{prefix}/bin/python\nimport packed\nprint(packed.VALUE)\n")
    return prefix


@pytest.fixture(autouse=True)
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    """As if the Python that the environment was made with lay on every node's own disk: it is not packed."""
    monkeypatch.setattr("hpc_mp.launch.staging.members.SYSTEM", (Path(sys.base_prefix),))


def python_of(environment: Path) -> Interpreter:
    return interpreter([str(environment / "bin" / "python")])


def packed_of(environment: Path) -> StagedEnvironment:
    return stage.pack(python_of(environment), environment.parent / "cache", lambda done, total: None)


def unpack(packed: StagedEnvironment, tmp_path: Path, name: str = ODD) -> tuple[Path, str]:
    """What node-start.sh does with it, through node-start.sh: the environment's place, and stderr."""
    run = tmp_path / "run"
    run.mkdir(exist_ok=True)
    (run / "attempt.json").write_text(json.dumps({"token": "1.0.1"}))
    local = tmp_path / name / "hpc-mp-0" / "1.0"
    done = subprocess.run(["bash", asset("slurm/node-start.sh"), run, "1.0.1", "--environment", packed.archive, packed.prefix],
                          env=os.environ | {"HPC_MP_LOCAL": str(local)}, capture_output=True, text=True, check=True)
    return local / "env", done.stderr


def ask_packages(env: Path) -> str:
    return subprocess.run([env / "bin" / "python", "-P", "-c", "import packed, edited, json, sys\n"
                           "print(packed.VALUE, edited.VALUE, sys.prefix, packed.__file__, edited.__file__, json.__file__)"],
                          capture_output=True, text=True, check=True).stdout


@pytest.mark.parametrize("with_base", [True, False])
def test_the_copy_works_without_the_original(environment: Path, tmp_path: Path, with_base: bool,
                                             monkeypatch: pytest.MonkeyPatch) -> None:
    if with_base:
        monkeypatch.setattr("hpc_mp.launch.staging.members.SYSTEM", SYSTEM)
    shown = []
    packed = stage.pack(python_of(environment), tmp_path / "cache", lambda done, total: shown.append((done, total)))
    assert shown[-1] == (packed.bytes, packed.bytes)
    environment.rename(tmp_path / "gone")
    (tmp_path / "checkout").rename(tmp_path / "gone too")

    env, said = unpack(packed, tmp_path)
    assert said == ""
    words = ask_packages(env)
    assert words.startswith("packed edited ")
    assert words.count(str(env)) == (4 if with_base else 3)  # prefix, both packages, and the standard library
    env, _ = unpack(packed, tmp_path, "plain")
    assert subprocess.run([env / "bin" / "tool"], capture_output=True, text=True, check=True).stdout == "packed\n", "a script"


def test_an_archive_is_made_once(environment: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And anew when a file of the environment has changed, in place of the old one; bytecode does not count."""
    first = Path(packed_of(environment).archive)
    changed = first.stat().st_mtime_ns
    library = python_of(environment).libraries[0]
    (library / "__pycache__").mkdir(exist_ok=True)
    (library / "__pycache__" / "packed.pyc").write_bytes(b"")
    assert packed_of(environment).archive == str(first) and first.stat().st_mtime_ns == changed
    (library / "packed.py").write_text("VALUE = 'other'\n")
    second = Path(packed_of(environment).archive)
    assert second != first
    assert sorted(path.name for path in first.parent.iterdir()) == [second.name, f"{second.name}.bytes"]
    second.unlink()
    monkeypatch.setattr(stage, "COMPRESS", ("no-such-program",))
    packed = packed_of(environment)
    with tarfile.open(packed.archive) as tar:
        assert sum(member.size for member in tar if member.isfile()) == packed.bytes, "a plain tar"


def test_links(environment: Path, tmp_path: Path) -> None:
    """Those inside stay links, those that lead out are copied, those that lead nowhere are left out."""
    library = next(environment.glob("lib/python*/site-packages"))
    (tmp_path / "outside").mkdir()
    (tmp_path / "outside" / "data").write_text("7")
    for name, target in {"inner": library / "packed.py", "outer": tmp_path / "outside", "nowhere": tmp_path / "absent"}.items():
        (library / name).symlink_to(target)
    found = {Path(member.name).relative_to(library.relative_to(environment)): member
             for member in members(python_of(environment))
             if Path(member.name).is_relative_to(library.relative_to(environment))}
    assert found[Path("inner")].link == "packed.py"
    assert found[Path("outer/data")].source == str(tmp_path / "outside" / "data")
    assert Path("nowhere") not in found


def test_only_what_git_knows_of_a_checkout(environment: Path, tmp_path: Path) -> None:
    checkout = tmp_path / "checkout"
    subprocess.run(["git", "init", "-q", checkout], check=True)
    (checkout / ".gitignore").write_text("runs/\n")
    (checkout / "runs").mkdir()
    (checkout / "runs" / "huge").write_text("x")
    names = [member.name for member in members(python_of(environment))]
    assert "editable/0/edited/__init__.py" in names
    assert not [name for name in names if "runs/" in name or ".git/" in name]


def test_what_cannot_be_packed(environment: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(HpcMpError, match="does not say what it is"):
        interpreter([str(tmp_path / "absent")])
    python = python_of(environment)
    (tmp_path / "cache").write_text("a file")
    with pytest.raises(HpcMpError, match="cannot be written"):
        packed_of(environment)
    content = members(python)
    (python.libraries[0] / "packed.py").unlink()
    with pytest.raises(HpcMpError, match=r"packed\.py: could not be packed"):
        write_tar(content, io.BytesIO(), lambda done: None)
    monkeypatch.setattr("hpc_mp.launch.staging.members.MOST_CHECKOUT", 3)
    with pytest.raises(HpcMpError, match="without -e"):
        members(python)
    (python.libraries[0] / "__editable__.x.pth").write_text("import __editable___x_finder; __editable___x_finder.install()\n")
    with pytest.raises(HpcMpError, match="editable_mode=compat"):
        members(python)
    monkeypatch.setattr("hpc_mp.launch.staging.members.SYSTEM", SYSTEM)
    with pytest.raises(HpcMpError, match=r"system's Python .*-m venv"):
        interpreter(["/usr/bin/python3"], lambda argv: json.dumps(["/usr", "/usr", "3.11.2", "/usr/bin/python3"]))


def test_a_prefix_of_its_own(tmp_path: Path) -> None:
    """As conda makes it: Python and packages in one directory; other environments below it stay where they are."""
    prefix = tmp_path / "conda"
    for name in ("bin/python3", "lib/python3.11/site-packages/gym/envs/__init__.py", "envs/other/bin/python3"):
        (prefix / name).parent.mkdir(parents=True, exist_ok=True)
        (prefix / name).write_text("")
    found = Interpreter(prefix, prefix, "3.11.7", prefix / "bin/python3", (prefix / "lib/python3.11/site-packages",))
    assert [member.name for member in members(found)] == [
        ".relocate", "bin/python3", "lib/python3.11/site-packages/gym/envs/__init__.py"]


def test_a_broken_archive_and_no_room_are_no_failures(environment: Path, tmp_path: Path) -> None:
    """The node then uses the environment itself, and says so."""
    packed = packed_of(environment)
    archive = Path(packed.archive)
    archive.write_bytes(archive.read_bytes()[:archive.stat().st_size // 2])
    env, said = unpack(packed, tmp_path, "broken")
    assert env.resolve() == environment and "is not staged" in said and not list(env.parent.glob(".env.*"))
    archive.with_name(f"{archive.name}.bytes").write_text(f"{1 << 60}\n")
    env, said = unpack(packed, tmp_path)
    assert env.resolve() == environment and "needs 1073741824.0 GiB" in said and "is not staged" in said
    assert ask_packages(env).startswith("packed edited ")
