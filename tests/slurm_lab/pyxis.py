"""pyxis and enroot in a directory, for a lab whose srun knows ``--container-image``.

``python -m tests.slurm_lab.pyxis PYXIS ENROOT DIR`` builds it from checkouts of github.com/NVIDIA/pyxis and /enroot;
``HPC_MP_PYXIS=DIR`` passes it to the tests. The build needs gcc, make, libslurm-dev and libbsd-dev, running it squashfs-tools,
jq, parallel, zstd and curl.
"""

import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from .lab import Lab

NAMED = "HPC_MP_PYXIS"
KINDS = ("hooks", "mounts", "environ")
HELPERS = ("aufs2ovlfs", "mksquashovlfs", "mount", "switchroot", "nsenter")
# Each host of a lab has its own /tmp, and the ordinary user's shell refuses logins.
SETTINGS = {"RUNTIME_PATH": "/tmp/enroot-$(id -u)/run", "CACHE_PATH": "/tmp/enroot-$(id -u)/cache",
            "DATA_PATH": "/tmp/enroot-$(id -u)/data", "TEMP_PATH": "/tmp", "LOGIN_SHELL": "no"}
NEEDS_CGROUPS = "10-cgroups.sh"  # hosts of a lab have none


def built(pyxis: Path, enroot: Path, directory: Path) -> Path:
    """Build the directory and return it. Raises CalledProcessError, with the compiler's output, if the build fails."""
    programs, library, settings = directory / "bin", directory / "lib", directory / "etc" / "enroot"
    for place in (programs, library, *(settings / f"{kind}.d" for kind in KINDS)):
        place.mkdir(parents=True, exist_ok=True)
    subprocess.run(["make", "-C", pyxis], check=True, stdout=sys.stderr)
    shutil.copy(pyxis / "spank_pyxis.so", library)
    for name in HELPERS:
        source, made = enroot / "bin" / f"enroot-{name}.c", programs / f"enroot-{name}"
        subprocess.run(["gcc", "-std=gnu99", "-O2", "-D_GNU_SOURCE", "-o", made, source, "-lbsd"], check=True)
    text = (enroot / "enroot.in").read_text()
    for name, value in {"sysconfdir": settings, "libdir": library, "version": "lab"}.items():
        text = text.replace(f"@{name}@", str(value))
    (programs / "enroot").write_text(text)
    (programs / "enroot").chmod(0o755)
    for files, into in (("src/*.sh", library), *((f"conf/{kind}/*.*", settings / f"{kind}.d") for kind in KINDS)):
        for file in enroot.glob(files):
            if file.name != NEEDS_CGROUPS:
                shutil.copy(file, into)
    (settings / "enroot.conf").write_text("".join(f"ENROOT_{name} {value}\n" for name, value in SETTINGS.items()))
    (directory / "etc" / "plugstack.conf").write_text(f"required {library}/spank_pyxis.so\n")
    return directory


def why_not_pyxis() -> str | None:
    if not os.environ.get(NAMED):
        return f"no pyxis: {NAMED} names none (tests/slurm_lab/pyxis.py makes it)"
    return None if shutil.which("mksquashfs") else "mksquashfs is not installed (Debian's squashfs-tools)"


@contextmanager
def lab_with_pyxis() -> Iterator[Lab]:
    """Yield a lab of two hosts with pyxis. slurmd finds enroot on the PATH with which it was started."""
    directory, path = Path(os.environ[NAMED]), os.environ["PATH"]
    os.environ["PATH"] = f"{directory / 'bin'}:{path}"
    try:
        with Lab(2, overrides={"PlugStackConfig": str(directory / "etc" / "plugstack.conf")}) as lab:
            yield lab
    finally:
        os.environ["PATH"] = path


if __name__ == "__main__":
    print(built(*(Path(word).resolve() for word in sys.argv[1:4])))
