"""The folder FOLDER with Pyodide and the packages of docs/planner, from npm and PyPI, for tests and for pages
without a CDN.

Pyodide's own build of pydantic is only on its CDN. In its place stands that of PyPI, and the lock file is changed to name it.
"""

import hashlib
import io
import json
import subprocess
import sys
import tarfile
import urllib.request
from pathlib import Path

VERSION = "314.0.7"  # as in docs/planner/worker.js
ANY = ("pydantic", "pydantic-core", "annotated-types", "typing-extensions", "typing-inspection", "jinja2", "tomli-w", "click",
       "rich")
WANTED = {  # pip's options: packages; MarkupSafe does without its compiled half
    ("--implementation", "cp", "--abi", "cp314", "--platform", "pyemscripten_2026_0_wasm32"): ANY,
    ("--platform", "manylinux2014_x86_64"): ("markupsafe",)}
FILES = ("pyodide.mjs", "pyodide.asm.mjs", "pyodide.asm.wasm", "python_stdlib.zip", "pyodide-lock.json")


def fetch(folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with urllib.request.urlopen(f"https://registry.npmjs.org/pyodide/-/pyodide-{VERSION}.tgz", timeout=300) as answer:
        content = io.BytesIO(answer.read())
    with tarfile.open(fileobj=content) as archive:
        for name in FILES:
            if member := archive.extractfile(f"package/{name}"):
                (folder / name).write_bytes(member.read())
    pip = [sys.executable, "-m", "pip", "download", "--quiet", "--no-deps", "--only-binary=:all:", "--python-version", "3.14",
           "--dest", str(folder)]
    for options, packages in WANTED.items():
        subprocess.run([*pip, *options, *packages], check=True)
    lock = json.loads((folder / "pyodide-lock.json").read_text(encoding="utf-8"))
    for wheel in folder.glob("*.whl"):
        name, version = wheel.name.split("-")[:2]
        digest = hashlib.sha256(wheel.read_bytes()).hexdigest()
        lock["packages"][name.replace("_", "-")] |= {"version": version, "file_name": wheel.name, "sha256": digest}
    (folder / "pyodide-lock.json").write_text(json.dumps(lock), encoding="utf-8")


if __name__ == "__main__":
    fetch(Path(sys.argv[1]))
